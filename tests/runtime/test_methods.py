"""Tests of LoRA+, NEFTune, label smoothing, z-loss and other initial adapters, against PEFT."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.model.adapters import LoraSettings, build_adapters
from recipec.runtime.model.families import FAMILIES
from recipec.runtime.model.initial import initial_adapters
from tests import tiny
from tests.runtime import training
from tests.runtime.decoders import EVERY, layers, make
from tests.runtime.references import Alike, save_adapter, store_in_nf4, twenty_steps

METHODS = {
    "init": "zero_a",
    "plus_ratio": 4.0,
    "label_smoothing": 0.1,
    "z_loss": 1e-3,
    "neftune_noise_alpha": 5.0,
}


BLOCKS = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
"""Sizes of which every device has whole blocks of nf4."""


def held(alike: Alike) -> None:
    """Compare a run with PEFT's: losses, gradients and changes of the weights."""
    print(alike)
    assert alike.losses <= 1e-5 * alike.of_loss
    assert alike.gradients <= 1e-4
    assert alike.parameters <= 0.02 * alike.moved
    assert alike.moved > 5e-3


@pytest.mark.parametrize("case", ["gemma1", pytest.param("granite", marks=pytest.mark.nightly)])
def test_twenty_steps_with_combined_methods_match_peft(case: str, tmp_path: Path) -> None:
    """Cover both orders: transformers scales Gemma's embeddings before the noise, and Granite's after it."""
    import jax

    model = make(case, tmp_path / "base")
    with jax.default_matmul_precision("highest"):
        axes = {"fsdp": 2, "tp": 2}
        alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", targets=EVERY, **METHODS)
    held(alike)


@pytest.mark.parametrize(
    ("case", "targets", "quantize"),
    [
        ("phi3", EVERY, "nf4"),
        pytest.param("phi3", EVERY, None, marks=pytest.mark.nightly),
        pytest.param("gemma3", ("q_proj", "v_proj", "down_proj"), None, marks=pytest.mark.nightly),
    ],
)
def test_twenty_dora_steps_match_peft(
    case: str, targets: tuple[str, ...], quantize: str | None, tmp_path: Path
) -> None:
    """Cover fused keys and values of which only one half has an adapter, and a base of nf4's numbers."""
    import jax

    make_base = partial(tiny.make_gemma3, num_hidden_layers=2) if case == "gemma3" else partial(make, case)
    model = make_base(tmp_path / "base", **(BLOCKS if quantize else {}))
    if quantize:
        store_in_nf4(layers(model))
    with jax.default_matmul_precision("highest"):
        axes, more = {"fsdp": 2, "tp": 2}, {"kind": "dora", "plus_ratio": 2.0}
        more |= {"quantize": quantize} if quantize else {}
        alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", targets=targets, **more)
    held(alike)


@pytest.mark.parametrize(
    ("case", "axes", "methods"),
    [
        ("phi3", {"fsdp": 2, "tp": 2}, {"init": "pissa", "rslora": True, "rank_pattern": {"o_proj": 3}}),
        pytest.param(
            *("gemma3", {"fsdp": 1, "tp": 1}, {"init": "olora", "kind": "dora"}), marks=pytest.mark.nightly
        ),
    ],
)
def test_twenty_steps_from_pissa_and_olora_init_match_peft(
    case: str, axes: dict[str, int], methods: dict[str, Any], tmp_path: Path
) -> None:
    """Subtract the adapters' first product from the base, as PEFT does."""
    import jax

    make_base = tiny.make_gemma3 if case == "gemma3" else partial(make, case)
    model = make_base(tmp_path / "base")
    targets = EVERY if case == "phi3" else ("q_proj", "v_proj", "down_proj")
    with jax.default_matmul_precision("highest"):
        alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", targets=targets, **methods)
    held(alike)


@pytest.mark.parametrize(
    ("case", "whole", "rows", "tp"),
    [
        ("phi3", ("embed_tokens", "lm_head", "input_layernorm"), (), 2),
        pytest.param("gemma1", ("embed_tokens", "model.norm"), (), 2, marks=pytest.mark.nightly),
        ("phi3", ("lm_head",), (499, 3, 41), 1),
        ("gemma1", (), (3, 499, 400, 516), 2),
    ],
)
def test_twenty_steps_with_whole_modules_and_token_rows_match_peft(
    case: str, whole: tuple[str, ...], rows: tuple[int, ...], tp: int, tmp_path: Path
) -> None:
    """Train whole modules, and rows of the embedding.

    The first case starts from a DoRA adapter of PEFT. The second model ties its head to its embedding
    (ensure_weight_tying in PEFT), and gets rows that tp does not divide and that tokens use.
    """
    import jax

    more: dict[str, Any] = {"vocab_size": 517, "neftune_noise_alpha": 5.0 if rows else None}
    model = make(case, tmp_path / "base", **({} if case == "phi3" else {"vocab_size": 400}))
    if case == "phi3":
        more = {"kind": "dora", "start_from": str(tmp_path / "adapter")}
        names = ("qkv_proj",)
        saved = {"modules_to_save": [*whole], "trainable_token_indices": sorted(rows) or None}
        save_adapter(model, tmp_path / "adapter", names, use_dora=True, **saved)
        model = type(model).from_pretrained(tmp_path / "base")
    with jax.default_matmul_precision("highest"):
        axes, targets = {"fsdp": tp, "tp": tp}, ("q_proj", "qkv_proj")
        more |= {"train_also": whole, "train_tokens": rows}
        alike = twenty_steps(tmp_path / "base", model, axes, tmp_path / "run", targets=targets, **more)
    held(alike)


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param({"train_also": ("embed_tokens", "norm")}, marks=pytest.mark.nightly),
        {"train_also": ("norm",), "train_tokens": (7, 499)},
    ],
)
def test_a_bfloat16_model_keeps_whole_modules_and_rows_in_float32(
    methods: dict[str, Any], tmp_path: Path
) -> None:
    """Sum updates of 1e-5, far below bfloat16's steps, and gradients of that size.

    Of the embedding, only the rows have a state.
    """
    import optax

    base, axes = tmp_path / "base", {"fsdp": 2, "tp": 1}
    make("phi3", base)
    mesh, built = training.build(base, axes, dtype="bfloat16", **methods)
    before = training.adapters(built)
    with mesh:
        trainer = training.trainer(built, mesh, tmp_path / "run", optax.adam(1e-5), 2, every_steps=3)
        training.fit(trainer, tmp_path / "run", 3, lambda step: 1e-5)
    states = training.arrays(trainer.optimizer).values()
    assert "bfloat16" not in {str(array.dtype) for array in states}
    rows = "train_tokens" in methods
    assert rows != any(array.shape[:1] == (tiny.VOCAB,) for array in states)
    assert rows == any(array.shape == (2, 48) for array in states)
    after = training.adapters(built)
    assert len(built.whole) == 2
    for path in (parameter.path for parameter in built.whole):
        assert after[path].dtype == np.float32
        assert 0 < np.abs(after[path] - before[path]).max() < 1e-4
    assert built.model.embedder.input_embedding.get_value().dtype == "bfloat16"


def test_whole_modules_and_rows_in_bfloat16_accumulate_gradients_in_float32(tmp_path: Path) -> None:
    """As adapters in bfloat16 do: their moments are bfloat16."""
    import optax

    make("gemma1", tmp_path / "base")
    methods = {"train_also": ("norm",), "train_tokens": (7, 499), "lora_dtype": "bfloat16"}
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
    from recipec.runtime.checkpoints.record import INITIAL
    from recipec.runtime.errors import UserError
    from recipec.runtime.training import first_values

    make("phi3", tmp_path / "base")
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
    import torch

    from recipec.runtime.model.principal import svd_lowrank

    random = np.random.default_rng(0)
    weight = random.standard_normal((48, 80)).astype(np.float32)
    drawn = torch.tensor(np.random.default_rng(1).standard_normal((48, 6), dtype=np.float32))
    monkeypatch.setattr(torch, "randn", lambda *shape, **_: drawn)
    u, s, v = torch.svd_lowrank(torch.tensor(weight), 6, niter=2)
    found = svd_lowrank(weight, 6, 2, np.random.default_rng(1))
    assert np.allclose(found[1], s.numpy(), rtol=1e-5)
    expected = (u * s @ v.T).numpy()
    assert np.abs(found[0] * found[1] @ found[2] - expected).max() <= 1e-5 * np.abs(expected).max()
