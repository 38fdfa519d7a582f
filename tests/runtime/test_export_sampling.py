"""Tests of merged folders against an independent computation.

Correct folders pass. Each kind of wrong folder fails with a message about its error.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from recipec.runtime.checkpoints.trained_weights import (
    ReplacedTensor,
    TrainedAdapters,
    TrainedWeights,
    load_trained,
)
from recipec.runtime.merging import tensor_samples
from recipec.runtime.merging.merged_files import check_files
from recipec.runtime.merging.tensor_samples import Sampled, check_tensors
from recipec.runtime.weights.checkpoint import HFCheckpoint
from tests import tiny
from tests.refusals import message
from tests.runtime.runs import lora_section, save_run

SINGLE = "model.safetensors"
UP = "model.layers.1.mlp.up_proj.weight"
K, V = (f"model.layers.1.self_attn.{letter}_proj.weight" for letter in "kv")
Trained = TrainedAdapters | TrainedWeights


def merged_tensors(base: HFCheckpoint, trained: Trained, dtype: str) -> dict[str, np.ndarray]:
    """Merge in float32, and cast once."""
    out = {}
    changes = trained.changes(base)
    for name in base.tensors:
        weight, change = base.read(name), changes.get(name)
        if change is None:
            out[name] = weight
        elif isinstance(change, ReplacedTensor):
            out[name] = np.ascontiguousarray(change.read().astype(dtype))
        else:
            b = change.b.astype(np.float32) * np.float32(change.scale)
            out[name] = (weight.astype(np.float32) + b @ change.a.astype(np.float32)).astype(dtype)
    return out


def write_folder(folder: Path, base: HFCheckpoint, tensors: Mapping[str, np.ndarray]) -> Path:
    """Write a merged folder of one file, with the record of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), folder / SINGLE)
    (folder / "config.json").write_bytes(base.side_file("config.json"))
    write_record(folder)
    return folder


def write_record(folder: Path) -> dict[str, Any]:
    """Write the merge.json of the current files."""
    files = {
        path.name: {"size": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for path in sorted(folder.iterdir())
        if path.name != "merge.json"
    }
    record = {"merge": 1, "quantization": None, "files": files}
    (folder / "merge.json").write_text(json.dumps(record))
    return record


@dataclass(frozen=True)
class Case:
    """A base, a run of random adapters, and their merge in bfloat16."""

    base: HFCheckpoint
    trained: TrainedAdapters
    tensors: Mapping[str, np.ndarray]

    @classmethod
    def make(cls, folder: Path, make: Any, sizes: Mapping[str, Any], section: Mapping[str, Any]) -> Case:
        make(folder / "base", **sizes)
        base = HFCheckpoint.open(folder / "base")
        save_run(folder / "run", base, lora_section(**section))
        trained = load_trained(folder / "run", "latest", base)
        assert isinstance(trained, TrainedAdapters)
        return cls(base, trained, merged_tensors(base, trained, "bfloat16"))

    def check(self, folder: Path, tensors: Mapping[str, np.ndarray], **options: Any) -> Sampled:
        """Check a folder of tensors against its record."""
        write_folder(folder, self.base, tensors)
        return check_tensors(self.base, self.trained, folder, "bfloat16", **options)

    def message(self, folder: Path, **tensors: np.ndarray) -> str:
        """Return the error about the merge with some other tensors."""
        return message(lambda: self.check(folder, {**self.tensors, **tensors}))


PATTERNS = {"rank_pattern": {"k_proj": 2, "down_proj": 5}, "alpha_pattern": {r"layers\.0\..*v_proj": 1.0}}
TWO = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "multimodal-rslora-patterns": (tiny.make_gemma4, {**TWO, "shards": 3}, {"rslora": True, **PATTERNS}),
    "text-shared-bfloat16": (
        tiny.make_gemma4,
        {**TWO, "multimodal": False},
        {"kv": "shared", "dtype": "bfloat16"},
    ),
    "mha-patterns": (tiny.make_gemma3, {"num_key_value_heads": 8, "num_hidden_layers": 1}, PATTERNS),
}


@pytest.mark.parametrize("name", CASES)
def test_check_accepts_correct_merge(name: str, tmp_path: Path) -> None:
    case = Case.make(tmp_path, *CASES[name])
    for dtype, largest in (("bfloat16", 0.05), ("float32", 1e-5)):
        tensors = merged_tensors(case.base, case.trained, dtype)
        folder = write_folder(tmp_path / dtype, case.base, tensors)
        found = check_tensors(case.base, case.trained, folder, dtype)
        changes = case.trained.changes(case.base)
        assert found.trained == len(changes) and found.kept == len(case.base.tensors) - len(changes)
        assert found.elements == sum(change.shape[0] * change.shape[1] for change in changes.values())
        assert 0 < found.largest < largest
        assert 0 < found.share <= 1
    assert found.off > 0, "float32 arithmetic is not float64's"


def test_check_accepts_full_fine_tuning_and_finds_reordered_rows(tmp_path: Path) -> None:
    tiny.make_gemma4(tmp_path / "base", **tiny.GEMMA4_EXPERTS)
    base = HFCheckpoint.open(tmp_path / "base")
    random = np.random.default_rng(0)
    parameters = tuple(p for p in base.family.parameters(base.architecture) if p.trainable)
    arrays = {p.path: random.standard_normal(p.shape).astype(np.float32) for p in parameters}
    trained = TrainedWeights(1, {}, b"", parameters, arrays.__getitem__)
    tensors = merged_tensors(base, trained, "bfloat16")
    found = check_tensors(base, trained, write_folder(tmp_path / "a", base, tensors), "bfloat16")
    assert found.trained == sum(len(p.sources) for p in parameters) and found.off == 0
    for name in ("layers.1.self_attn.k_proj.weight", "layers.1.self_attn.o_proj.weight"):
        full = base.prefix + name
        wrong = tensors[full].copy()
        wrong[:4] = wrong[:4][::-1]
        folder = write_folder(tmp_path / "b", base, {**tensors, full: wrong})
        text = message(lambda folder=folder: check_tensors(base, trained, folder, "bfloat16"))
        assert f"{full} is not what was trained" in text and "first [0, 0]" in text


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("case")
    return Case.make(folder, tiny.make_gemma3, {"num_hidden_layers": 2}, {"layers": [1]})


def test_check_finds_one_element_off_by_one_ulp(case: Case, tmp_path: Path) -> None:
    wrong = case.tensors[UP].copy()
    wrong.view(np.uint16)[7, 5] += 1
    text = case.message(tmp_path, **{UP: wrong})
    assert f"{SINGLE}: {UP} is not what was trained: 1 of {wrong.size:,} compared elements" in text
    assert "first [7, 5]: " in text


def test_check_finds_truncating_cast_and_exchanged_changes(case: Case, tmp_path: Path) -> None:
    changes = case.trained.changes(case.base)
    up, k, v = (changes[name].scale * (changes[name].b @ changes[name].a) for name in (UP, K, V))
    exact = (case.base.read(UP) + up).astype(np.float32)
    cut = (exact.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)
    assert f"{UP} is not what was trained" in case.message(tmp_path / "cut", **{UP: cut})
    exchanged = {
        name: (case.base.read(name) + delta).astype(ml_dtypes.bfloat16) for name, delta in ((K, v), (V, k))
    }
    text = case.message(tmp_path / "exchanged", **exchanged)
    assert f"{K} is not what was trained" in text


def test_check_finds_wrong_projection_scale_in_merge(case: Case, tmp_path: Path) -> None:
    """Find a wrong Adapter.scale in the merge, because the check reads rank and alpha again."""
    adapters = tuple(replace(adapter, scale=2 * adapter.scale) for adapter in case.trained.adapters)
    wrong = replace(case.trained, adapters=adapters)
    tensors = merged_tensors(case.base, wrong, "bfloat16")
    folder = write_folder(tmp_path, case.base, tensors)
    text = message(lambda: check_tensors(case.base, wrong, folder, "bfloat16"))
    assert "is not what was trained" in text


def test_check_finds_changed_bit_in_untrained_tensor(case: Case, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.q_norm.weight"
    wrong = case.tensors[name].copy()
    wrong.view(np.uint8)[-1] ^= 0x80
    text = case.message(tmp_path, **{name: wrong})
    assert f"{SINGLE}: {name} was not trained, and does not have the base's bytes" in text


def test_check_files_finds_changed_short_and_missing_files(case: Case, tmp_path: Path) -> None:
    folder = write_folder(tmp_path, case.base, case.tensors)
    record = json.loads((folder / "merge.json").read_text())
    size = sum((folder / name).stat().st_size for name in (SINGLE, "config.json"))
    assert check_files(folder, record) == size and len(record["files"]) == 2
    whole = (folder / SINGLE).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    (folder / SINGLE).write_bytes(flipped)
    text = message(lambda: check_files(folder, record))
    assert f"{folder / SINGLE}: is not what was written: its SHA-256 is " in text
    (folder / SINGLE).write_bytes(whole[:-1])
    assert f"has {len(whole) - 1:,} bytes, merge.json says {len(whole):,}" in message(
        lambda: check_files(folder, record)
    )
    (folder / SINGLE).unlink()
    assert "is missing; merge.json lists it" in message(lambda: check_files(folder, record))
    assert "merge.json lists no files" in message(lambda: check_files(folder, {"merge": 1}))


def test_check_finds_wrong_tensor_names_types_and_shapes(case: Case, tmp_path: Path) -> None:
    without = {name: array for name, array in case.tensors.items() if name != UP}
    assert f"holds no {UP}, which the base has" in message(lambda: case.check(tmp_path / "0", without))
    text = case.message(tmp_path / "1", more=np.zeros(2, np.float32))
    assert "holds more, which the base does not have" in text
    text = case.message(tmp_path / "2", **{UP: case.tensors[UP].astype(np.float32)})
    assert f"{UP} is of type float32, expected bfloat16" in text
    shape = list(case.tensors[UP].shape)
    text = case.message(tmp_path / "3", **{UP: case.tensors[UP].T.copy()})
    assert f"{UP} has shape {shape[::-1]}, the base's has {shape}" in text


def encoded(weight: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Return a weight in float8 or int8, and the scale of each row."""
    dtype, largest = (ml_dtypes.float8_e4m3fn, 448.0) if kind == "fp8" else (np.int8, 127.0)
    scale = np.abs(weight).max(axis=1, keepdims=True) / np.float32(largest)
    scaled = np.clip(weight / scale, -largest, largest)
    return (scaled if kind == "fp8" else np.rint(scaled)).astype(dtype), scale


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_check_finds_wrong_quantized_values_and_scales(case: Case, kind: str, tmp_path: Path) -> None:
    untouched = UP.replace("layers.1", "layers.0")
    wide = merged_tensors(case.base, case.trained, "float32")
    tensors = dict(case.tensors)
    for name in (UP, untouched):
        tensors[name], tensors[f"{name}_scale"] = encoded(wide[name], kind)
    found = case.check(tmp_path / "right", tensors)
    assert found.share <= 1
    for name in (UP, untouched):
        wrong = tensors[name].copy()
        wrong.view(np.uint8)[3, 4] ^= 1
        text = message(lambda name=name, wrong=wrong: case.check(tmp_path / "a", {**tensors, name: wrong}))
        assert f"{name} is not what was trained: 1 of" in text and "first [3, 4]" in text
        half = tensors[f"{name}_scale"] / 2
        text = message(
            lambda name=name, half=half: case.check(tmp_path / "b", {**tensors, f"{name}_scale": half})
        )
        assert f"{name} is not what was trained" in text
    del tensors[f"{UP}_scale"]
    assert f"{UP} is of type" in message(lambda: case.check(tmp_path / "c", tensors))


def test_sampled_rows_cover_all_parts_of_large_tensor() -> None:
    for shape in ((21504, 5376), (5376, 21504), (262144, 5376), (128, 1408, 2816), (70, 1 << 16)):
        rows = tensor_samples.sample_rows(shape, np.random.default_rng(3))
        width = int(np.prod(shape[1:]))
        assert (np.diff(rows) > 0).all() and rows[0] >= 0 and rows[-1] < shape[0]
        assert 8 <= len(rows) <= 256
        gaps = np.diff([-1, *rows, shape[0]])
        parts = min(64, len(rows))
        assert gaps.max() <= 2 * shape[0] / parts + 1, "no larger stretch goes unseen"
        blocks = tensor_samples.sampled_blocks(shape, np.random.default_rng(3))
        assert np.array_equal(np.concatenate(blocks), rows)
        assert max(len(block) * width for block in blocks) <= max(tensor_samples.BLOCK_ELEMENTS, width)


def test_check_finds_wrong_block_of_large_tensor(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_samples, "WHOLE", 1 << 10)
    monkeypatch.setattr(tensor_samples, "ROWS", 16)
    monkeypatch.setattr(tensor_samples, "STRATA", 16)
    monkeypatch.setattr(tensor_samples, "BLOCK_ELEMENTS", 1 << 8)
    found = case.check(tmp_path, case.tensors)
    size = sum(case.tensors[name].size for name in case.trained.changes(case.base))
    assert 0 < found.elements < size / 4
    embedding = "model.embed_tokens.weight"
    for seed, name in enumerate((UP, UP, embedding, embedding)):
        wrong = case.tensors[name].copy()
        length = len(wrong) // 8
        wrong[3 * length : 4 * length] += np.ones((), wrong.dtype)
        tensors = {**case.tensors, name: wrong}
        text = message(lambda tensors=tensors, seed=seed: case.check(tmp_path, tensors, seed=seed))
        assert f"{name} " in text
