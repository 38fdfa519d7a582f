"""Tests of QLoRA under torchax: train.py's codes and scales, and torch's gradients of their values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flax import nnx
from jax._src.ad_checkpoint import saved_residuals

from recipec.runtime.model import loading as models
from recipec.runtime.model.quantize import dequantize
from recipec.runtime.model.sharding import shard_rows
from recipec.runtime.training.losses import batch_loss
from tests import tiny
from tests.backends.torchax_models import (
    Torchax,
    build,
    largest_difference,
    packed_batch,
    reference,
    torch_gradients,
)

AXES = {"fsdp": 2, "tp": 4}
ODD = {"hidden_size": 80, "intermediate_size": 112}
"""No size is a multiple of 64: a device's 40 inputs are one block, and so are the MLP's 28."""
TARGETS = ("q_proj", "k_proj", "o_proj", "down_proj")


def weights(built: Torchax) -> dict[str, np.ndarray]:
    """Dequantize the quantized tensors, by their names without the prefix."""
    from recipec.runtime.backends.torchax.hf_model import tensor_name

    return {
        tensor_name(name): np.asarray(dequantize(built.arrays[name], np.float32))
        for name in built.model.quantized
    }


@pytest.mark.parametrize("kind", ["nf4", pytest.param("int8", marks=pytest.mark.e2e)])
def test_quantized_codes_and_scales_equal_train_py(kind: str, tmp_path: Path) -> None:
    """Compare each device's part bit for bit: Gemma 4's keys and values, and keys used as values."""

    from recipec.runtime.backends.torchax.hf_model import tensor_name

    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    tiny.make_gemma4(tmp_path, **layers, **ODD)
    built = build(tmp_path, AXES, quantization=kind, targets=TARGETS)
    with built.mesh:
        theirs = models.build(built.base, built.settings, built.lora, built.mesh)
    variables = {".".join(map(str, path)): node for path, node in nnx.iter_graph(theirs.model)}
    found = {tensor_name(name): built.arrays[name] for name in built.model.quantized}
    for parameter in theirs.parameters:
        if parameter.path not in theirs.quantized:
            continue
        raw = variables[parameter.path].get_raw_value()
        for number, source in enumerate(parameter.sources):
            ours = found.pop(source.name)
            for array, expected in ((ours.qvalue, raw.qvalue), (ours.scale, raw.scale)):
                part = np.asarray(expected)[number] if len(parameter.sources) > 1 else np.asarray(expected)
                part = part.transpose(np.argsort(source.transpose)).reshape(array.shape)
                assert np.array_equal(np.asarray(array), part), source.name
    assert not found
    for name, how in built.model.quantized.items():
        array = built.arrays[name]
        for leaf, spec in ((array.qvalue, how.spec), (array.scale, how.scale_spec)):
            split = [AXES.get(axis or "", 1) for axis in spec]
            local = leaf.addressable_shards[0].data.shape
            assert local == tuple(n // parts for n, parts in zip(leaf.shape, split, strict=True)), name
        assert array.qvalue.dtype == ("uint4" if kind == "nf4" else "int8")


@pytest.mark.e2e
@pytest.mark.parametrize(("kind", "remat"), [("nf4", "save_dots"), ("int8", "decoder")])
def test_gradients_match_torch_with_dequantized_base(kind: str, remat: str, tmp_path: Path) -> None:
    """Use Qwen 2, whose projections have biases. Projections without an adapter are quantized too."""
    make: Any = tiny.make_qwen2
    make(tmp_path, num_hidden_layers=1, **ODD)
    built = build(tmp_path, AXES, quantization=kind, remat=remat, targets=TARGETS)
    loss, gradients = built.gradients(packed_batch())
    model = reference(built)
    plain, _ = torch_gradients(model, packed_batch(), built.base)
    found = weights(built)
    for name, parameter in model.named_parameters():
        own = name.removeprefix("base_model.model.model.").replace(".base_layer", "")
        if own in found:
            with torch.no_grad():
                parameter.copy_(torch.tensor(found.pop(own)))
    assert not found
    expected, theirs = torch_gradients(model, packed_batch(), built.base)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert largest_difference(gradients, theirs) < 1e-5
    assert max(np.abs(array).max() for array in theirs.values()) > 0.01
    assert abs(expected - plain) > 1e-3, "quantizing is seen"


@pytest.mark.e2e
def test_the_backward_pass_keeps_no_dequantized_weight(tmp_path: Path) -> None:
    """Keep codes as residuals.

    Without rematerialization, the residuals of a plain model are its weights.
    """
    tiny.make_llama(tmp_path, num_hidden_layers=1)
    one = packed_batch()

    def kept(kind: str | None) -> set[tuple[tuple[int, ...], str]]:
        built = build(tmp_path, AXES, quantization=kind, targets=TARGETS)
        placed = shard_rows(one, built.mesh)

        def loss(trained: Any) -> Any:
            arrays: Any = (trained, built.arrays, None)
            return batch_loss(built.model, arrays, placed)

        with built.mesh:
            return {(aval.shape, str(aval.dtype)) for aval, _ in saved_residuals(loss, built.trained)}

    found = {kind: kept(kind) for kind in (None, "nf4")}
    weight = (128, 64)
    assert {(weight, "float32"), (weight[::-1], "float32")} & found[None]
    assert (weight, "uint4") in found["nf4"]
    assert not {(weight, "float32"), (weight[::-1], "float32")} & found["nf4"]
