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

from recipec.runtime.merging.quantized import FORMATS, ignored, quantization
from recipec.runtime.model.families.base import Names
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny

NAMES = ("fp8", "int8")
SHAPES = [(1, 1), (7, 5), (64, 33), (129, 257)]
CHECKPOINTS: dict[str, Callable[[Path], Any]] = {
    "gemma4": lambda path: tiny.make_gemma4(path, audio=True),
    "gemma4-text": lambda path: tiny.make_gemma4(path, multimodal=False, num_hidden_layers=6),
    "gemma4-e2b": lambda path: tiny.make_gemma4(path, **tiny.GEMMA4_E2B),
    "gemma4-experts": lambda path: tiny.make_gemma4(path, **tiny.GEMMA4_EXPERTS),
    "gemma3": tiny.make_gemma3,
    "gemma2": tiny.make_gemma2,
    "llama": tiny.make_llama,
    "qwen2": tiny.make_qwen2,
    "qwen3": tiny.make_qwen3,
}


def encoded(name: str, weight: np.ndarray, rows: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Return the quantized weight and its scales, computed in blocks of `rows`."""
    rows = rows or max(1, len(weight))
    scheme = quantization(name)
    assert scheme is not None
    *blocks, scales = scheme.encode(weight[i : i + rows] for i in range(0, len(weight), rows))
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


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_quantized_weights_match_torch_rounding(name: str, shape: tuple[int, int]) -> None:
    weight = awkward(shape)
    values, scales = encoded(name, weight, rows=3)
    assert values.dtype == FORMATS[name].dtype and values.shape == shape
    np.testing.assert_array_equal(values.view(np.int8), torch_encoded(name, weight, scales))


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


@pytest.mark.parametrize("name", NAMES)
def test_float32_row_scales_map_row_maximum_to_largest_value(name: str) -> None:
    weight = awkward((64, 33))
    values, scales = encoded(name, weight)
    largest = np.abs(weight).max(axis=1, keepdims=True)
    assert scales.dtype == np.float32 and scales.shape == (64, 1)
    usual = np.r_[0, 3:64]
    np.testing.assert_array_equal(scales[usual], (largest / np.float32(FORMATS[name].largest))[usual])
    assert (np.abs(values.astype(np.float32)).max(axis=1)[usual] == FORMATS[name].largest).all()


@pytest.mark.parametrize("name", NAMES)
def test_zero_and_tiny_rows_become_zeros_with_scale_one(name: str) -> None:
    weight = np.zeros((3, 8), np.float32)
    weight[1] = 1e-41
    weight[2, 3] = 1e-37
    values, scales = encoded(name, weight)
    assert not values.astype(np.float32).any()
    assert scales.tolist() == [[1.0]] * 3


@pytest.mark.parametrize("name", NAMES)
def test_block_size_does_not_change_quantized_result(name: str) -> None:
    weight = awkward((64, 33))
    whole = encoded(name, weight)
    for rows in (1, 7, 63):
        for expected, got in zip(whole, encoded(name, weight, rows), strict=True):
            np.testing.assert_array_equal(expected.view(np.uint8), got.view(np.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_encode_reads_one_block_at_a_time(name: str) -> None:
    taken = []

    def blocks() -> Any:
        for number in range(4):
            taken.append(number)
            yield np.ones((2, 3), np.float32)

    scheme = quantization(name)
    assert scheme is not None
    out = scheme.encode(blocks())
    for number in range(4):
        assert next(out).shape == (2, 3)
        assert len(taken) == number + 1
    assert next(out).shape == (8, 1)


@pytest.mark.parametrize("name", NAMES)
def test_scheme_outputs_match_encoded_types_and_shapes(name: str) -> None:
    scheme = quantization(name)
    assert scheme is not None
    weight = "model.layers.0.mlp.up_proj.weight"
    assert scheme.outputs(weight, (7, 5)) == [
        (weight, {"fp8": "F8_E4M3", "int8": "I8"}[name], (7, 5)),
        ("model.layers.0.mlp.up_proj.weight_scale", "F32", (7, 1)),
    ]
    values, scales = encoded(name, awkward((7, 5)))
    assert (values.shape, values.itemsize, scales.shape, scales.itemsize) == ((7, 5), 1, (7, 1), 4)


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_lora_targets_are_quantized_and_other_linears_ignored(kind: str, tmp_path: Path) -> None:
    model = CHECKPOINTS[kind](tmp_path / "base")
    base = HFCheckpoint.open(tmp_path / "base")
    scheme = quantization("fp8")
    assert scheme is not None
    quantized = {name for name in base.tensors if scheme.applies(base, name)}
    targets = base.family.lora_targets(base.architecture)
    assert quantized == {f"{base.prefix}{module}.weight" for target in targets for module in target.modules}

    ignore = scheme.config(base, quantized)["ignore"]
    linear = {name for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    kept = {name for name in linear if not is_ignored(name, ignore)}
    assert kept == {name.removesuffix(".weight") for name in quantized}


def is_ignored(name: str, ignore: list[str]) -> bool:
    """Match like compressed-tensors, vLLM and vLLM-TPU: from the name's start, and always by a pattern."""
    assert all(pattern.startswith("re:") for pattern in ignore)
    return any(re.match(pattern[3:], name) for pattern in ignore)


@pytest.mark.parametrize("root", ["model.language_model.", "language_model.model."])
def test_ignore_patterns_match_module_names_of_every_loader(root: str, tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path / "base", audio=True, **tiny.GEMMA4_EXPERTS)
    base = HFCheckpoint.open(tmp_path / "base")
    scheme = quantization("int8")
    assert scheme is not None
    ignore = scheme.config(base, [name for name in base.tensors if scheme.applies(base, name)])["ignore"]
    for name in ("router.proj", "experts", "moe.experts", "experts.0.gate_proj"):
        assert is_ignored(f"{root}layers.0.{name}", ignore), name
    for name in (
        "lm_head",
        "language_model.lm_head",
        "vision_tower.encoder.layers.0.self_attn.q_proj.linear",
        "model.vision_tower.layers.0.mlp.gate_up_proj",
        "embed_vision.embedding_projection",
        "model.audio_tower.layers.0.self_attn.q_proj",
    ):
        assert is_ignored(name, ignore), name
    for name in ("self_attn.q_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"):
        assert not is_ignored(f"{root}layers.0.{name}", ignore), name


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
    for name, kind in (("fp8", "float"), ("int8", "int")):
        scheme = quantization(name)
        assert scheme is not None
        quantized = [tensor for tensor in base.tensors if scheme.applies(base, tensor)]
        assert scheme.config(base, quantized) == {
            "quant_method": "compressed-tensors",
            "format": f"{kind}-quantized",
            "quantization_status": "compressed",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {
                        "num_bits": 8,
                        "type": kind,
                        "symmetric": True,
                        "strategy": "channel",
                        "dynamic": False,
                    },
                    "input_activations": {
                        "num_bits": 8,
                        "type": kind,
                        "symmetric": True,
                        "strategy": "token",
                        "dynamic": True,
                    },
                    "output_activations": None,
                }
            },
            "ignore": [
                r"re:(.*\.)?embed_tokens(\..*)?$",
                r"re:(.*\.)?embed_vision(\..*)?$",
                r"re:(.*\.)?lm_head(\..*)?$",
                r"re:(.*\.)?vision_tower(\..*)?$",
            ],
            "kv_cache_scheme": None,
        }
