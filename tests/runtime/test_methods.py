"""Tests of LoRA+, NEFTune, label smoothing, z-loss and other initial adapters, against PEFT."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch

from recipec.runtime.checkpoints.first_adapters import INITIAL
from recipec.runtime.errors import UserError
from recipec.runtime.model.adapters import LoraSettings, build_adapters
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.initial import initial_adapters, svd_lowrank
from recipec.runtime.training import first_values
from tests import tiny
from tests.runtime import training
from tests.runtime.decoders import EVERY, layers, make
from tests.runtime.references import save_adapter, store_in_nf4, twenty_steps

COMBINED = {
    **{"init": "pissa", "rslora": True, "rank_pattern": {"o_proj": 3}, "loraplus_lr_ratio": 4.0},
    **{"label_smoothing": 0.1, "z_loss": 1e-3, "neftune_noise_alpha": 5.0},
}
BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
"""Sizes of which every device has whole blocks of nf4."""
NF4 = {"kind": "dora", "loraplus_lr_ratio": 2.0, "quantization": "nf4"}
STARTED = {
    "kind": "dora",
    "modules_to_save": ("lm_head", "input_layernorm"),
    "trainable_tokens": (499, 3, 41),
}
ROWS = {"trainable_tokens": (3, 499, 400, 516), "neftune_noise_alpha": 5.0, "vocab_size": 517}
TIED = {"modules_to_save": ("embed_tokens", "model.norm"), "vocab_size": 517}
FEW = ("q_proj", "v_proj", "down_proj")
QUERIES = ("q_proj", "qkv_proj")


@pytest.mark.parametrize(
    ("case", "parts", "targets", "methods"),
    [
        pytest.param("gemma1", 2, EVERY, COMBINED, id="combined", marks=pytest.mark.e2e),
        pytest.param("granite", 2, EVERY, COMBINED, id="combined-granite", marks=pytest.mark.nightly),
        pytest.param("phi3", 2, ("qkv_proj", "down_proj"), NF4, id="dora-nf4"),
        pytest.param(
            "gemma3", 1, FEW, {"init": "olora", "kind": "dora"}, id="olora", marks=pytest.mark.nightly
        ),
        pytest.param("phi3", 2, QUERIES, STARTED, id="dora-start-from", marks=pytest.mark.nightly),
        pytest.param("gemma1", 2, QUERIES, ROWS, id="tied-rows"),
        pytest.param("gemma1", 2, QUERIES, TIED, id="tied-embedding", marks=pytest.mark.nightly),
    ],
)
def test_twenty_steps_match_peft(
    case: str, parts: int, targets: tuple[str, ...], methods: dict[str, Any], tmp_path: Path
) -> None:
    """Compare losses, gradients and changes of the weights.

    The combined methods cover both orders: transformers scales Gemma's embeddings before the noise, and
    Granite's after it. PiSSA subtracts the adapters' first product from the base. One case starts from a DoRA
    adapter of PEFT. Tied models (ensure_weight_tying in PEFT) get rows that tp does not divide and that
    tokens use.
    """
    make_base = tiny.make_gemma3 if case == "gemma3" else partial(make, case)
    sizes = {"vocab_size": 400} if "vocab_size" in methods else {"num_hidden_layers": 1}
    model = make_base(tmp_path / "base", **(BLOCKS if "quantization" in methods else {}), **sizes)
    more = dict(methods)
    if "quantization" in methods:
        store_in_nf4(layers(model))
    elif methods is STARTED:
        more["start_from"] = str(tmp_path / "adapter")
        rows = {"trainable_token_indices": sorted(methods["trainable_tokens"])}
        saved = {"modules_to_save": [*methods["modules_to_save"]], **rows}
        save_adapter(model, tmp_path / "adapter", ("qkv_proj",), use_dora=True, **saved)
        model = type(model).from_pretrained(tmp_path / "base")
    axes = {"fsdp": parts, "tp": parts}
    with jax.default_matmul_precision("highest"):
        alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", targets=targets, **more)
    print(alike)
    assert alike.losses <= 1e-5 * alike.of_loss
    assert alike.gradients <= 1e-4
    assert alike.parameters <= 0.02 * alike.moved
    assert alike.moved > 5e-3


def test_a_bfloat16_model_keeps_whole_modules_and_rows_in_float32(tmp_path: Path) -> None:
    """Sum updates of 1e-5, far below bfloat16's steps, and gradients of that size.

    Of the embedding, only the rows have a state.
    """
    make("phi3", tmp_path / "base", num_hidden_layers=1)
    methods = {"modules_to_save": ("norm",), "trainable_tokens": (7, 499)}
    mesh, built = training.build(tmp_path / "base", {"fsdp": 2, "tp": 1}, dtype="bfloat16", **methods)
    before = training.adapters(built)
    with mesh:
        trainer = training.trainer(built, mesh, tmp_path / "run", optax.adam(1e-5), 2, every_steps=3)
        training.fit(trainer, tmp_path / "run", 3, lambda step: 1e-5)
    states = training.arrays(trainer.optimizer).values()
    assert "bfloat16" not in {str(array.dtype) for array in states}
    assert not any(array.shape[:1] == (tiny.VOCAB,) for array in states)
    assert any(array.shape == (2, 48) for array in states)
    after = training.adapters(built)
    assert len(built.whole) == 2
    for path in (parameter.path for parameter in built.whole):
        assert after[path].dtype == np.float32
        assert 0 < np.abs(after[path] - before[path]).max() < 1e-4
    assert built.model.embedder.input_embedding.get_value().dtype == "bfloat16"


def test_whole_modules_and_rows_in_bfloat16_accumulate_gradients_in_float32(tmp_path: Path) -> None:
    """As adapters in bfloat16 do: their moments are bfloat16."""
    make("gemma1", tmp_path / "base", num_hidden_layers=1)
    methods = {"modules_to_save": ("norm",), "trainable_tokens": (7, 499), "lora_dtype": "bfloat16"}
    mesh, built = training.build(tmp_path / "base", {"fsdp": 1, "tp": 1}, dtype="bfloat16", **methods)
    before = training.adapters(built)
    with mesh:
        trainer = training.trainer(built, mesh, tmp_path / "run", optax.adam(1e-2), 2, every_steps=2)
        training.fit(trainer, tmp_path / "run", 2, lambda step: 1e-2)
    states = training.arrays(trainer.optimizer).items()
    kinds = {(("acc_grads" in path), str(array.dtype)) for path, array in states if array.ndim}
    assert kinds == {(True, "float32"), (False, "bfloat16")}
    assert all((training.adapters(built)[p.path] != before[p.path]).any() for p in built.whole)


@pytest.mark.parametrize(("init", "which"), [("gaussian", 0), ("zero_a", 1)])
def test_gaussian_and_zero_a_init_draw_expected_values(init: str, which: int) -> None:
    family = FAMILIES["gemma4"]
    architecture = family.architecture({**tiny.gemma4_text(), "model_type": "gemma4_text"})
    lora = LoraSettings(rank=8, alpha=8.0, targets=EVERY, dropout=0.0, init=init)
    found = initial_adapters(build_adapters(family, architecture, lora), lora, 3)
    drawn = np.concatenate([pair[which].ravel() for pair in found.values()])
    assert not any(pair[1 - which].any() for pair in found.values())
    assert drawn.all(), "and every entry of the other is"
    expected = 1 / 8 if init == "gaussian" else (8 * 3) ** -0.5
    assert abs(drawn.std() - expected) < 0.02 * expected
    assert init == "gaussian" or np.abs(drawn).max() <= 8**-0.5


def test_resumed_run_reads_initial_values_on_another_mesh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read the frozen and initial values of the run's start bit for bit, or report that they are missing."""
    make("phi3", tmp_path / "base", num_hidden_layers=1)
    lora = {"init": "pissa_niter_2", "targets": EVERY, "kept": tmp_path}
    began = training.build(tmp_path / "base", {"fsdp": 2, "tp": 2}, **lora)[1]
    plain = training.build(tmp_path / "base", {"fsdp": 2, "tp": 2}, targets=EVERY)[1]
    monkeypatch.setattr(first_values, "first_values", None)
    again = training.build(tmp_path / "base", {"fsdp": 1, "tp": 1}, **lora)[1]
    weights = [training.weights(built) for built in (began, again, plain)]
    arrays = [training.adapters(built) for built in (began, again)]
    assert all(np.array_equal(arrays[0][path], arrays[1][path]) for path in arrays[0])
    assert all(np.array_equal(weights[0][path], weights[1][path]) for path in weights[0])
    changed = {path for path in weights[0] if not np.array_equal(weights[0][path], weights[2][path])}
    assert changed == {adapter.target.weight for adapter in began.adapters}
    whole = (tmp_path / INITIAL).read_bytes()
    (tmp_path / INITIAL).write_bytes(whole[:-100])
    with pytest.raises(UserError, match="cannot be read"):
        training.build(tmp_path / "base", {"fsdp": 1, "tp": 1}, **lora)


def test_svd_lowrank_matches_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start from the same random directions, without more of them than the rank."""
    random = np.random.default_rng(0)
    weight = random.standard_normal((48, 80)).astype(np.float32)
    drawn = torch.tensor(np.random.default_rng(1).standard_normal((48, 6), dtype=np.float32))
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: drawn)
    u, s, v = torch.svd_lowrank(torch.tensor(weight), 6, niter=2)
    found = svd_lowrank(weight, 6, 2, np.random.default_rng(1))
    assert np.allclose(found[1], s.numpy(), rtol=1e-5)
    expected = (u * s @ v.T).numpy()
    assert np.abs(found[0] * found[1] @ found[2] - expected).max() <= 1e-5 * np.abs(expected).max()
