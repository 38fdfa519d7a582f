"""Twenty steps on rows with pictures: train.py against train_trl.py, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.parity.compare import TOLERANCES, ComparedRun, compare
from tests.parity.parity_cases import ALL, recipe
from tests.parity.running import Case, Place, merged_tensors

FULL = ["full_attention"] * 2
MODELS = {
    "gemma3": ("google/gemma-3-4b-it", ["sliding_attention", "full_attention"]),
    "llava": ("llava-hf/llava-1.5-7b-hf", FULL),
    "mistral3": ("mistralai/Mistral-Small-3.1-24B-Instruct-2503", FULL),
    "paddleocr_vl": ("PaddlePaddle/PaddleOCR-VL", FULL),
    "pixtral": ("mistral-community/pixtral-12b", FULL),
    "qwen2_5_vl": ("Qwen/Qwen2.5-VL-3B-Instruct", FULL),
    "qwen3_vl": ("Qwen/Qwen3-VL-2B-Instruct", FULL),
    "qwen3_vl_moe": ("Qwen/Qwen3-VL-30B-A3B-Instruct", FULL),
}
IN_E2E = ("gemma3", "qwen2_5_vl")


def case(name: str, **lora: Any) -> Case:
    like, layers = MODELS[name]
    targets = ALL[:4] if name == "qwen3_vl_moe" else ALL  # its experts are no linear layers
    data = {"packing": True, "max_length": 256, "images": {}}
    settings = recipe(
        {"fsdp": 2, "tp": 1},
        {"rank": 4, "alpha": 8, "targets": targets, **lora},
        data,
        global_batch_size=4,
        micro_batch_size=1,
    )
    return Case(like, layers, settings)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.e2e if name in IN_E2E else pytest.mark.nightly) for name in MODELS],
)
def test_twenty_steps_with_pictures_match_train_py(name: str, tmp_path: Path) -> None:
    _compared(case(name), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl"])
def test_a_trained_tower_matches_train_py(name: str, tmp_path: Path) -> None:
    """Leave out Qwen's queries and keys: pictures of one color have hardly any gradient there."""
    tower = {"gemma3": ["out_proj", "fc1"], "qwen2_5_vl": ["proj", "mlp.0"]}[name]
    _compared(case(name, vision=True, targets=[*ALL, *tower]), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("like", "first"),
    [
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "chunked_attention"),
        ("Qwen/Qwen3.5-0.8B", "linear_attention"),
    ],
)
def test_texts_alone_of_a_multimodal_checkpoint_match_train_py(like: str, first: str, tmp_path: Path) -> None:
    settings = case("llava", targets=ALL[:4]).recipe
    data = {"train": ["train.jsonl"], "packing": False, "max_length": 64}
    _compared(Case(like, [first, "full_attention"], {**settings, "data": data}), tmp_path)


def _compared(of: Case, folder: Path) -> None:
    """Check that all quantities of the two runs are within their limits."""
    backends = (Backend.TUNIX, Backend.TRL)
    place = Place(folder, of, backends)
    runs = []
    for backend in backends:
        trace = place.train(backend, backend.value)
        if backend is Backend.TRL:
            place.merge(backend.value, "--import-adapter", folder / backend.value / "adapter")
        runs.append(ComparedRun(backend.value, trace, merged_tensors(place.merge(backend.value))))
    rows = compare(runs, TOLERANCES["float32"])
    for row in rows:
        print(f"\n{row.quantity} differ by {row.difference} of {row.largest:.3g}: {row.note}")
    assert [row for row in rows if not row.ok] == []
    (losses,) = (row for row in rows if row.quantity == "losses")
    assert losses.relative is not None and losses.relative <= 1e-5
