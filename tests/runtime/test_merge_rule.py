"""Tests of the merge rule: what A and B add to which tensor, and which modules PEFT is told."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from recipec.runtime.checkpoints.trained_weights import Delta
from recipec.runtime.merging import arithmetic
from recipec.runtime.merging.arithmetic import changed_blocks, is_finite
from recipec.runtime.model.adapters import Adapter, LoraSettings, build_adapters
from recipec.runtime.model.families import family_of
from recipec.runtime.peft.exporting import select_modules
from recipec.runtime.weights.safetensors_files import DTYPES
from tests import tiny
from tests.runtime.runs import ALL, random_arrays


def architecture(kind: str) -> tuple[Any, Any]:
    """Return a family and an architecture whose sizes differ wherever equal sizes could hide an error."""
    gemma3 = {
        "model_type": "gemma3_text",
        "vocab_size": 11,
        "hidden_size": 10,
        "intermediate_size": 14,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
    }
    configs = {
        "gemma4": {
            "model_type": "gemma4_text",
            **tiny.gemma4_text(hidden_size=10, intermediate_size=14, head_dim=4),
        },
        "gemma3": gemma3,
        "gemma2": {**gemma3, "model_type": "gemma2"},
    }
    family = family_of(configs[kind])
    return family, family.architecture(configs[kind])


def hand_written(adapter: Adapter, a: np.ndarray, b: np.ndarray) -> tuple[str, np.ndarray]:
    """Return the projection's name and its unscaled delta [out, in], written out for each kind of weight."""
    kind = adapter.target.weight.split(".")[-2]
    layer = f"layers.{adapter.target.layer}"
    if kind in ("q_proj", "k_proj", "v_proj"):
        product = np.einsum("dr,rnh->nhd", a, b)
        return f"{layer}.self_attn.{kind}", product.reshape(-1, a.shape[0])
    if kind == "o_proj":
        product = np.einsum("nhr,rd->dnh", a, b)
        return f"{layer}.self_attn.o_proj", product.reshape(b.shape[1], -1)
    assert kind in ("gate_proj", "up_proj", "down_proj")
    return f"{layer}.mlp.{kind}", np.einsum("ir,ro->oi", a, b)


@pytest.mark.parametrize("kv", ["independent", "shared"])
@pytest.mark.parametrize(
    "targets", [ALL, ("k_proj",), ("v_proj",), ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj")]
)
@pytest.mark.parametrize("kind", ["gemma4", "gemma3", "gemma2"])
def test_split_deltas_match_array_products(kind: str, targets: tuple[str, ...], kv: str) -> None:
    family, arch = architecture(kind)
    lora = LoraSettings(rank=3, alpha=5.0, targets=targets, kv=kv, dropout=0.0)
    adapters = build_adapters(family, arch, lora)
    arrays = random_arrays(adapters)
    shapes = {
        source.name.removesuffix(".weight"): source.shape
        for parameter in family.parameters(arch)
        for source in parameter.sources
    }
    seen = set()
    for adapter in adapters:
        a, b = arrays[adapter.a_path], arrays[adapter.b_path]
        name, expected = hand_written(adapter, a, b)
        low, high = adapter.to_peft(a, b)
        assert name == adapter.name
        assert (low.shape[0], high.shape[1]) == (3, 3)
        assert (high.shape[0], low.shape[1]) == shapes[name]
        np.testing.assert_allclose(high @ low, expected, rtol=1e-5, atol=1e-6)
        seen.add(name)
    assert seen == {name for name in shapes if name.rpartition(".")[2] in targets}


def test_merge_adds_scaled_ba_and_rounds_once_for_any_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    a, b = random.standard_normal((4, 50)), random.standard_normal((7, 4))
    weight = random.standard_normal((7, 50)).astype(ml_dtypes.bfloat16)
    delta = Delta(a.astype(np.float32), b.astype(np.float32), 0.5)
    exact = weight.astype(np.float64) + 0.5 * (b @ a)
    for elements in (1, 100, 1 << 20):
        monkeypatch.setattr(arithmetic, "BLOCK_ELEMENTS", elements)
        wide = np.concatenate(list(changed_blocks(weight, delta, np.dtype("float32"))))
        narrow = np.concatenate(list(changed_blocks(weight, delta, weight.dtype)))
        np.testing.assert_allclose(wide, exact, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(narrow, wide.astype(ml_dtypes.bfloat16))


TEXT = {f"model.layers.{i}.self_attn.{n}_proj" for i in range(12) for n in "qkvo"}
VISION = {f"vision.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"}


@pytest.mark.parametrize(
    "chosen, modules, targets, layers",
    [
        (TEXT, TEXT, ["k_proj", "o_proj", "q_proj", "v_proj"], None),
        (
            {m for m in TEXT if m.split(".")[2] in ("1", "11") and m.endswith("q_proj")},
            TEXT,
            ["q_proj"],
            [1, 11],
        ),
        (
            {m for m in TEXT if m.endswith(("k_proj", "v_proj"))},
            TEXT | VISION,
            r"model\.layers\.\d+\.(self_attn\.k_proj|self_attn\.v_proj)",
            None,
        ),
        (
            {"model.layers.1.self_attn.q_proj", "model.layers.10.self_attn.q_proj"},
            TEXT | VISION,
            r"model\.layers\.(1|10)\.self_attn\.q_proj",
            None,
        ),
        (
            {"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.k_proj"},
            TEXT,
            r"model\.layers\.(0\.self_attn\.q_proj|1\.self_attn\.k_proj)",
            None,
        ),
    ],
)
def test_peft_target_modules_select_only_trained_modules(
    chosen: set[str], modules: set[str], targets: object, layers: object
) -> None:
    assert select_modules(chosen, modules, "model.") == (targets, layers)


@pytest.mark.parametrize("kind", DTYPES.values(), ids=DTYPES)
def test_is_finite_separates_finite_and_non_finite_values(kind: np.dtype) -> None:
    bits = np.arange(2**16, dtype=np.uint16).astype(f"u{min(kind.itemsize, 2)}")
    shift = 8 * max(0, kind.itemsize - 2)  # the highest 16 bits distinguish the values
    values = (bits.astype(f"u{kind.itemsize}") << shift).view(kind) if kind.kind != "b" else bits == 1
    floating = kind.kind in "fV"
    with np.errstate(invalid="ignore"):
        finite = np.isfinite(values.astype(np.float64)) if floating else np.ones(len(values), bool)
    assert is_finite(values[finite]) and is_finite(values[:0])
    assert not any(is_finite(values[[0, index]]) for index in np.flatnonzero(~finite)[::17])
    assert floating == (not finite.all())
