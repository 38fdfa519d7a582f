"""Tests of merges of damaged bases and runs: each is refused by name, and nothing of it is written."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.errors import UserError
from recipec.runtime.weights.checkpoint import INDEX, HFCheckpoint
from tests.runtime.llama_bases import TINY, contents, rewrite, write_base
from tests.runtime.merge_faults.merges import Place, Run, copy, noted, times


def cached(base: Path, root: Path) -> Path:
    """Copy a base into Hugging Face's cache layout, with blobs in a store of other names."""
    snapshot = root / "snapshots" / "0f"
    for folder in (snapshot, root / "blobs", root / "store"):
        folder.mkdir(parents=True)
    for path in base.iterdir():
        kind = hashlib.sha256 if path.suffix == ".safetensors" else hashlib.sha1
        name = kind(path.read_bytes()).hexdigest()
        if not (root / "blobs" / name).exists():
            shutil.copy(path, root / "store" / path.name)
            (root / "blobs" / name).symlink_to(f"../store/{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def downloaded(base: Path, root: Path) -> Path:
    """Copy a base with huggingface_hub's own notes of a download."""
    from huggingface_hub._local_folder import write_download_metadata

    copy(base, root)
    for path in base.glob("*.safetensors"):
        write_download_metadata(root, path.name, "a" * 40, hashlib.sha256(path.read_bytes()).hexdigest())
    return root


@pytest.mark.parametrize("made", [cached, downloaded])
def test_merge_refuses_base_file_that_differs_from_the_hubs_hash(
    made: Callable[[Path, Path], Path], place: Place, run: Run, tmp_path: Path
) -> None:
    base, target = made(place.base, tmp_path / "base"), tmp_path / "merged"
    file = base / "model-00003-of-00003.safetensors"
    right = file.read_bytes()
    file.write_bytes(right[:-5] + bytes([right[-5] ^ 1]) + right[-4:])
    run(target, base=base).refused(f"{file}: is not the file that the hub has")
    assert contents(target) == {}, "nothing is left of what was made of it"
    file.write_bytes(right)
    assert run(target, base=base).status == 0
    place.expect(target)


def test_merge_resumes_after_a_base_read_error_and_keeps_complete_files(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keep what was written before a network error."""
    target, read = tmp_path / "merged", HFCheckpoint.bytes_of

    def fail(self: HFCheckpoint, *rest: Any) -> memoryview:
        if noted(target):
            raise UserError("gs://base: cannot be read: timed out", "run the same command again")
        return read(self, *rest)

    monkeypatch.setattr(HFCheckpoint, "bytes_of", fail)
    run(target).refused("timed out")
    kept, before = noted(target), times(target)
    assert kept
    monkeypatch.undo()
    assert run(target).status == 0
    place.expect(target)
    assert all(times(target)[name] == before[name] for name in kept)


def shard_of(base: Path, module: str) -> Path:
    index = json.loads((base / INDEX).read_text())
    return base / str(index["weight_map"][f"model.{module}.weight"])


def change_index(base: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((base / INDEX).read_text())
    (base / INDEX).write_text(json.dumps(index | {"weight_map": change(index["weight_map"])}))


def configured(**changes: Any) -> Callable[[Path], None]:
    """Return a function that writes a base of other sizes."""

    def change(base: Path) -> None:
        shutil.rmtree(base)
        write_base(base, {**TINY, **changes})

    return change


@pytest.mark.parametrize(
    "damage, words",
    [
        (configured(intermediate_size=32), ["is 32; the run trained a model with 24", "--model"]),
        (configured(num_hidden_layers=3), ["layer_types is", "the run trained a model with", "--model"]),
        (
            configured(model_type="qwen3"),
            [
                "is of the family qwen3; the run trained one of llama",
                "checkpoint of the run with --model",
            ],
        ),
    ],
    ids=lambda value: getattr(value, "__qualname__", "").removesuffix(".<locals>.change") or None,
)
def test_merge_refuses_incomplete_or_mismatched_base_before_writing(
    damage: Callable[[Path], None], words: list[str], place: Place, run: Run, tmp_path: Path
) -> None:
    base = copy(place.base, tmp_path / "base")
    damage(base)
    run(tmp_path / "merged", base=base).refused(*words)
    assert not list(tmp_path.glob("merged*")), "refused before anything is written"


def set_value(base: Path, module: str, value: float) -> None:
    def change(arrays: dict[str, np.ndarray]) -> None:
        arrays[f"model.{module}.weight"].flat[-1] = value

    rewrite(shard_of(base, module), change)


@pytest.mark.parametrize(
    ("module", "value", "quantization"),
    [
        ("embed_tokens", np.nan, None),
        ("layers.0.self_attn.q_proj", -np.inf, None),
        ("layers.0.self_attn.q_proj", np.nan, "int8"),
    ],
)
def test_merge_refuses_non_finite_base_values_and_names_the_tensor(
    module: str, value: float, quantization: str | None, place: Place, run: Run, tmp_path: Path
) -> None:
    base = copy(place.base, tmp_path / "base")
    set_value(base, module, value)
    said = f"{shard_of(base, module)}: model.{module}.weight holds values that are not finite"
    run(tmp_path / "merged", base=base, quantization=quantization).refused(said, "download the checkpoint")
    assert contents(tmp_path / "merged") == {}, "nothing is left of what was made of it"


def test_merge_refuses_merged_values_that_overflow_the_dtype(place: Place, run: Run, tmp_path: Path) -> None:
    base = copy(place.base, tmp_path / "base")
    module = "layers.0.mlp.down_proj"
    set_value(base, module, -1e6)
    run(tmp_path / "merged", base=base, dtype="float16").refused(
        f"model.{module}.weight: its merged values are not finite in float16", "set merge.dtype to float32"
    )
    assert contents(tmp_path / "merged") == {}
    assert run(tmp_path / "merged", base=base, dtype="float32").status == 0


@pytest.mark.parametrize("value, dtype, status", [(np.inf, "F64", 0), (np.nan, "F64", 1), (np.nan, "C64", 0)])
def test_merge_allows_infinite_input_max_and_reports_unchecked_dtypes(
    value: float, dtype: str, status: int, place: Place, run: Run, tmp_path: Path
) -> None:
    base, name = copy(place.base, tmp_path / "base"), "vision.input_max"
    path = shard_of(base, "norm")
    rewrite(path, lambda arrays: arrays.update({name: np.array(value)}))
    path.write_bytes(path.read_bytes().replace(b'"F64"', f'"{dtype}"'.encode()))
    change_index(base, lambda names: {**names, name: path.name})
    outcome = run(tmp_path / "merged", base=base)
    assert outcome.status == status, outcome
    assert (f"{name} holds values" in outcome.err) is (status == 1)
    assert (f"not checked for values that are not finite: {name} (C64)" in outcome.out) is (dtype == "C64")
