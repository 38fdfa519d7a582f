"""Tests of merges of damaged bases and runs: each is refused by name, and nothing of it is written."""

from __future__ import annotations

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
                "base checkpoint of the run with --model",
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
