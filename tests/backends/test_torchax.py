"""Tests of transformers' models under torchax, against torch with PEFT: float32, virtual devices.

`make test` compares one model's gradients, and `make e2e` the others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import tiny
from tests.backends.torchax_models import (
    TWO_LAYERS,
    build,
    largest_difference,
    packed_batch,
    reference,
    steps,
    torch_gradients,
    torch_steps,
)
from tests.runtime import decoders
from tests.runtime.training import batch

WHOLE, SPLIT = {"fsdp": 8, "tp": 1}, {"fsdp": 4, "tp": 2}
DIVISIBLE = {"vocab_size": 512}
MODELS: dict[str, tuple[Any, dict[str, Any], dict[str, int]]] = {
    "llama": (tiny.make_llama, {}, WHOLE),
    "qwen3": (tiny.make_qwen3, DIVISIBLE, SPLIT),
    "gemma3": (tiny.make_gemma3, DIVISIBLE, SPLIT),
    "gemma4": (tiny.make_gemma4, TWO_LAYERS, WHOLE),
    # Granite scales its logits.
    "granite": (partial(decoders.make, "granite"), {}, WHOLE),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "gemma4" else pytest.mark.e2e) for name in MODELS]
)
def test_torchax_gradients_match_peft(name: str, tmp_path: Path) -> None:
    """Use packed rows with padding.

    transformers finds the samples by their positions. Its sliding layers see 8 of 16 tokens.
    """
    make, options, axes = MODELS[name]
    make(tmp_path, **options)
    built = build(tmp_path, axes, remat="decoder" if axes is SPLIT else "none")
    loss, gradients = built.gradients(packed_batch())
    expected, theirs = torch_gradients(reference(built), packed_batch(), built.base)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert largest_difference(gradients, theirs) < 1e-5
    assert max(np.abs(array).max() for array in theirs.values()) > 0.01


@pytest.mark.e2e
def test_twenty_adamw_steps_match_torch(tmp_path: Path) -> None:
    """Run AdamW over windows of two micro-batches."""
    tiny.make_llama(tmp_path)
    built = build(tmp_path, WHOLE)
    batches = [batch(index, accumulation=2) for index in range(40)]
    losses, trained = steps(built, batches, accumulation=2)
    expected, theirs = torch_steps(built, batches, accumulation=2)
    assert losses == pytest.approx(expected, abs=1e-4)
    assert largest_difference(trained, theirs) < 1e-5
    before = {name: np.asarray(array) for name, array in built.trained.items()}
    assert largest_difference(trained, before) > 1e-2


@pytest.mark.e2e
def test_dropout_does_not_depend_on_remat_or_mesh(tmp_path: Path) -> None:
    """Compare gradients with dropout: they depend only on the micro-batch's number.

    Neither recomputation nor the mesh changes them.
    """
    tiny.make_qwen3(tmp_path, num_hidden_layers=1)
    options: dict[str, Any] = {"dropout": 0.3, "targets": ("q_proj", "down_proj")}
    plain, one = build(tmp_path, WHOLE, **options), packed_batch()
    _, gradients = plain.gradients(one)
    for remat in ("decoder", "save_dots"):
        recomputed = build(tmp_path, SPLIT, remat=remat, **options)
        assert largest_difference(gradients, recomputed.gradients(one)[1]) < 1e-5
    other = dict(one, index=np.asarray(1, np.int32))
    assert largest_difference(gradients, plain.gradients(other)[1]) > 1e-3


@pytest.mark.e2e
def test_gradients_with_shared_key_value_layers_match_peft(tmp_path: Path) -> None:
    """Recompute Gemma 4 E2B's layers: what a layer passes to another one goes through jax.checkpoint."""
    tiny.make_gemma4(tmp_path, multimodal=False, **tiny.GEMMA4_E2B)
    built = build(tmp_path, SPLIT, remat="decoder", targets=("q_proj", "k_proj"))
    _, gradients = built.gradients(packed_batch())
    _, theirs = torch_gradients(reference(built), packed_batch(), built.base)
    assert largest_difference(gradients, theirs) < 1e-5


@pytest.mark.e2e
def test_adapters_of_a_bfloat16_base_and_their_gradients_stay_float32(tmp_path: Path) -> None:
    """Keep adapters, their gradients and rotary frequencies in float32; bfloat16 would distort the last."""
    tiny.make_llama(tmp_path, num_hidden_layers=1)
    built = build(tmp_path, WHOLE, dtype="bfloat16")
    kinds = {name: str(array.dtype) for name, array in built.arrays.items()}
    assert {name for name, kind in kinds.items() if kind == "float32"} == {
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
    }
    assert {str(array.dtype) for array in built.trained.values()} == {"float32"}
    loss, gradients = built.gradients(packed_batch())
    expected, theirs = torch_gradients(reference(built), packed_batch(), built.base)
    assert loss == pytest.approx(expected, rel=5e-3)
    for name, array in gradients.items():
        assert array.dtype == np.float32
        assert np.linalg.norm(array - theirs[name]) < 0.05 * np.linalg.norm(theirs[name]), name
