"""Tests of models that no family describes, computed by transformers: Helium and Bamba, against PEFT.

They use float32, awkward shapes and virtual devices. `make test` compares one model's gradients, and `make
e2e` the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipec.runtime.model.families.transformers import Transformers, TransformersArchitecture
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.backends.torchax_models import (
    build,
    largest_difference,
    packed_batch,
    reference,
    steps,
    torch_gradients,
    torch_steps,
)
from tests.runtime.training import batch

SPLIT = {"fsdp": 4, "tp": 2}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")
MODELS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "helium": (tiny.make_helium, ATTENTION),
    "bamba": (tiny.make_bamba, (*ATTENTION, "in_proj", "out_proj")),
}


@pytest.mark.parametrize("name", MODELS)
def test_lora_targets_are_all_linear_layers(name: str, tmp_path: Path) -> None:
    """Check that all tensors are parameters, in their stored form."""
    model = MODELS[name][0](tmp_path)
    base = HFCheckpoint.open(tmp_path)
    base.verify()
    assert base.family.name == "transformers"
    linear = {
        module.removeprefix("model.")
        for module, layer in model.model.named_modules(prefix="model")
        if isinstance(layer, torch.nn.Linear)
    }
    targets = base.family.lora_targets(base.architecture)
    assert {target.name for target in targets} == linear
    shapes = {p.sources[0].full_name(base.prefix): p.shape for p in base.family.parameters(base.architecture)}
    assert shapes == {key: tuple(value.shape) for key, value in model.state_dict().items()}


def test_helium_gradients_match_peft(tmp_path: Path) -> None:
    """Use packed rows with padding, where transformers finds the samples by their positions."""
    tiny.make_helium(tmp_path, num_hidden_layers=1)
    check_gradients(build(tmp_path, SPLIT, targets=ATTENTION), packed_batch())


@pytest.mark.e2e
@pytest.mark.parametrize("name", MODELS)
def test_twenty_adamw_steps_match_torch(name: str, tmp_path: Path) -> None:
    """Run AdamW over windows of two micro-batches, with recomputed layers, on fsdp 4 x tp 2."""
    make, targets = MODELS[name]
    make(tmp_path)
    built = build(tmp_path, SPLIT, remat="decoder", targets=targets)
    check_gradients(built, batch(0))
    batches = [batch(index, accumulation=2) for index in range(40)]
    losses, trained = steps(built, batches, accumulation=2)
    expected, theirs = torch_steps(built, batches, accumulation=2)
    assert losses == pytest.approx(expected, abs=1e-5)
    assert largest_difference(trained, theirs) < 1e-5
    before = {name: np.asarray(array) for name, array in built.trained.items()}
    assert largest_difference(trained, before) > 1e-2


@pytest.mark.e2e
def test_tied_embedding_gradients_match_peft(tmp_path: Path) -> None:
    """Check Bamba's gradients on a mesh that shards only the rows."""
    tiny.make_bamba(tmp_path, tie_word_embeddings=True)
    built = build(tmp_path, {"fsdp": 8, "tp": 1}, targets=("in_proj", "v_proj"))
    assert "lm_head.weight" not in built.arrays
    check_gradients(built, batch(0))


def check_gradients(built: Any, one: Any) -> None:
    """Compare a micro-batch's loss and gradients with PEFT's to 1e-5."""
    loss, gradients = built.gradients(one)
    expected, theirs = torch_gradients(reference(built), one, built.base)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert largest_difference(gradients, theirs) < 1e-5
    assert max(np.abs(array).max() for array in theirs.values()) > 0.01


def test_tensors_are_sharded_by_their_names() -> None:
    tensors = {
        "model.embed_tokens.weight": (509, 48),
        **{f"model.layers.{i}.self_attn.q_proj.weight": (60, 48) for i in range(3)},
        **{f"model.layers.{i}.self_attn.o_proj.weight": (48, 60) for i in range(3)},
        **{f"model.layers.{i}.self_attn.odd.weight": (9, 48) for i in range(2)},
        **{f"model.layers.{i}.conv1d.weight": (9, 1, 4) for i in range(3)},
        **{f"model.layers.{i}.norm.weight": (48,) for i in range(3)},
    }
    config = {"model_type": "any", "num_hidden_layers": 3, "hidden_size": 48, "num_attention_heads": 6}
    family = Transformers()
    architecture = family.architecture_of(config, tensors)
    specs = {p.path: p.spec for p in family.parameters(architecture)}
    assert specs["embed_tokens.weight"] == specs["layers.2.self_attn.q_proj.weight"] == ("tp", "fsdp")
    assert specs["layers.0.self_attn.o_proj.weight"] == ("fsdp", "tp")
    assert specs["layers.1.self_attn.odd.weight"] == ("fsdp", None)
    assert specs["layers.0.conv1d.weight"] == (None, None, None) and specs["layers.0.norm.weight"] == (None,)
    assert ("layers.{}.self_attn.odd.weight", (9, 48), "0-1") in architecture.tensors
    assert architecture.recurrent and not architecture.uniform


def test_uniform_model_can_be_shortened_to_fewer_layers() -> None:
    """Shorten the model as a plan does, which compiles only some layers."""
    tensors = {"model.embed_tokens.weight": (509, 48)}
    tensors |= {f"model.layers.{i}.self_attn.q_proj.weight": (48, 48) for i in range(9)}
    config = {"model_type": "any", "num_hidden_layers": 9, "hidden_size": 48, "layer_types": ["x"] * 9}
    architecture = Transformers().architecture_of(config, tensors)
    assert architecture.uniform
    short = architecture.shortened(range(4))
    assert short.num_layers == 4 and short.values["layer_types"] == ["x"] * 4
    kept = {
        name: shape for name, shape in tensors.items() if "layers" not in name or int(name.split(".")[2]) < 4
    }
    again = Transformers().architecture_of(config | {"num_hidden_layers": 4, "layer_types": ["x"] * 4}, kept)
    assert short == again and isinstance(again, TransformersArchitecture)
