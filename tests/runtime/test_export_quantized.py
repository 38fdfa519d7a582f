"""Tests of quantized weights: rounding, scales, the chosen tensors, and their config.json."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from recipec.runtime.merging.compressed_tensors import FORMATS, ignored
from recipec.runtime.model.families.family import Names
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny

NAMES = ("fp8", "int8")
CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "gemma4-e2b": lambda path: tiny.make_gemma4(path, audio=True, **tiny.GEMMA4_E2B),
    "gemma4-experts": lambda path: tiny.make_gemma4(path, **tiny.GEMMA4_EXPERTS),
    "llama": tiny.make_llama,
}


def encoded(name: str, weight: np.ndarray, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the quantized weight and its scales, computed in blocks of `rows`."""
    rows = rows or max(1, len(weight))
    *blocks, scales = FORMATS[name].encode(weight[i : i + rows] for i in range(0, len(weight), rows))
    return np.concatenate(blocks), scales


def torch_encoded(name: str, weight: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return torch's result as bits."""
    quotient = torch.from_numpy(weight) / torch.from_numpy(scales)
    if name == "fp8":
        return quotient.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.int8).numpy()
    return quotient.round().clamp(-127, 127).to(torch.int8).numpy()


def awkward(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Return weights whose rows differ by orders of magnitude, some of them zero, tiny or huge."""
    random = np.random.default_rng(seed)
    weight = random.standard_normal(shape).astype(np.float32)
    weight *= np.exp2(random.integers(-12, 4, shape[0]))[:, None].astype(np.float32)
    for row, factor in ((1, 0.0), (2, 1e-41), (3, 1e37)):
        if row < shape[0]:
            weight[row] *= np.float32(factor)
    return weight


@pytest.mark.parametrize("shape", [(1, 1), (64, 33), (129, 257)])
@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_match_torch_rounding_and_fill_each_row(name: str, shape: tuple[int, int]) -> None:
    weight = awkward(shape)
    values, scales = encoded(name, weight, rows=3)
    assert values.dtype == FORMATS[name].dtype and values.shape == shape
    assert scales.dtype == np.float32 and scales.shape == (shape[0], 1)
    np.testing.assert_array_equal(values.view(np.int8), torch_encoded(name, weight, scales))
    assert (scales[1:3] == 1).all() and not values[1:3].astype(np.float32).any(), "zero or tiny rows"
    usual = np.r_[0, 3 : shape[0]]
    largest = np.abs(weight).max(axis=1, keepdims=True) / np.float32(FORMATS[name].largest)
    np.testing.assert_array_equal(scales[usual], largest[usual])
    assert (np.abs(values.astype(np.float32)).max(axis=1)[usual] == FORMATS[name].largest).all()
    for expected, got in zip((values, scales), encoded(name, weight), strict=True):
        np.testing.assert_array_equal(expected.view(np.uint8), got.view(np.uint8))


def test_every_fp8_value_and_tie_matches_torch_rounding() -> None:
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    ties = (grid[1:] + grid[:-1]) / 2
    near = [np.nextafter(ties, np.float32(side)) for side in (0, 1e9)]
    points = np.concatenate([grid, ties, *near]).astype(np.float32)
    # A value of 448 in the row makes its scale exactly 1.
    weight = np.concatenate([points, -points, [np.float32(448)]])[None].astype(np.float32)
    values, scales = encoded("fp8", weight)
    assert scales.tolist() == [[1.0]]
    expected = torch.from_numpy(weight).to(torch.float8_e4m3fn).view(torch.int8).numpy()
    np.testing.assert_array_equal(values.view(np.int8), expected)


def test_encode_reads_one_block_at_a_time() -> None:
    taken = []

    def blocks() -> Any:
        for number in range(4):
            taken.append(number)
            yield np.ones((2, 3), np.float32)

    out = FORMATS["int8"].encode(blocks())
    for number in range(4):
        assert next(out).shape == (2, 3)
        assert len(taken) == number + 1
    assert next(out).shape == (8, 1)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_lora_targets_are_quantized_and_other_linears_ignored(kind: str, tmp_path: Path) -> None:
    model = CHECKPOINTS[kind](tmp_path / "base")
    base = HFCheckpoint.open(tmp_path / "base")
    scheme = FORMATS["fp8"]
    quantized = {name for name in base.tensors if scheme.applies(base, name)}
    targets = base.family.lora_targets(base.architecture)
    assert quantized == {f"{base.prefix}{target.name}.weight" for target in targets}

    ignore = scheme.config(base, quantized)["ignore"]
    linear = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    kept = {name for name in linear if not is_ignored(name, ignore)}
    assert kept == {name.removesuffix(".weight") for name in quantized}


def is_ignored(name: str, ignore: list[str]) -> bool:
    """Match like compressed-tensors, vLLM and vLLM-TPU: from the name's start, and always by a pattern."""
    assert all(pattern.startswith("re:") for pattern in ignore)
    return any(re.match(pattern[3:], name) for pattern in ignore)


def test_ignore_patterns_match_module_names_of_every_loader(tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path / "base", audio=True, **tiny.GEMMA4_EXPERTS)
    base = HFCheckpoint.open(tmp_path / "base")
    scheme = FORMATS["int8"]
    ignore = scheme.config(base, [name for name in base.tensors if scheme.applies(base, name)])["ignore"]
    for root in ("model.language_model.layers.0.", "language_model.model.layers.0."):
        for name in ("router.proj", "experts", "moe.experts", "experts.0.gate_proj"):
            assert is_ignored(root + name, ignore), name
        for name in ("self_attn.q_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"):
            assert not is_ignored(root + name, ignore), name
    for name in (
        "lm_head",
        "language_model.lm_head",
        "vision_tower.encoder.layers.0.self_attn.q_proj.linear",
        "model.vision_tower.layers.0.mlp.gate_up_proj",
        "embed_vision.embedding_projection",
        "model.audio_tower.layers.0.self_attn.q_proj",
    ):
        assert is_ignored(name, ignore), name


def test_nested_lm_head_does_not_ignore_whole_text_model() -> None:
    base = SimpleNamespace(
        family=SimpleNamespace(names=Names()),
        prefix="language_model.model.",
        tensors={
            name: SimpleNamespace(shape=(2, 2))
            for name in (
                "language_model.lm_head.weight",
                "language_model.model.embed_tokens.weight",
                "language_model.model.layers.0.mlp.up_proj.weight",
                "multi_modal_projector.mm_input_projection_weight",
                "vision_tower.vision_model.embeddings.patch_embedding.weight",
            )
        },
    )
    patterns = ignored(cast(Any, base), ["language_model.model.layers.0.mlp.up_proj.weight"])
    parts = ("embed_tokens", "lm_head", "multi_modal_projector", "vision_tower")
    assert patterns == [rf"re:(.*\.)?{part}(\..*)?$" for part in parts]


def test_quantization_config_is_in_compressed_tensors_format(tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path / "base", num_hidden_layers=1, layer_types=["full_attention"])
    base = HFCheckpoint.open(tmp_path / "base")
    scheme = FORMATS["fp8"]
    both = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**both, "strategy": "channel", "dynamic": False},
        "input_activations": {**both, "strategy": "token", "dynamic": True},
        "output_activations": None,
    }
    parts = ("embed_tokens", "embed_vision", "lm_head", "vision_tower")
    assert scheme.config(base, [name for name in base.tensors if scheme.applies(base, name)]) == {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [rf"re:(.*\.)?{part}(\..*)?$" for part in parts],
        "kv_cache_scheme": None,
    }
