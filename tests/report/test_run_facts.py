"""Tests of run.json and merges.json, a run's record of itself."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipec.runtime.data.row_counts import DataReport, SplitReport
from recipec.runtime.metrics import run_facts

DEVICES = {"platform": "cpu", "kind": "cpu", "count": 8, "processes": 1, "memory_bytes": None}


def prepared() -> Any:
    """Return a report as of cached data, whose counts are numpy's."""
    split = SplitReport(read=3, kept=3, rows=1, row_length=128)
    split.tokens = np.int64(60)  # type: ignore[assignment]
    samples = SimpleNamespace(lengths=np.array([10, 20, 30]))
    return SimpleNamespace(accumulation=2, report=DataReport(split, None, 1, 50, True), samples=samples)


def begin(folder: Path, after: Any = 0) -> dict[str, Any]:
    artifact = folder / "artifact"
    artifact.mkdir(exist_ok=True)
    (artifact / "recipe.yaml").write_text(f"recipe: 1  # {after}\n")
    run_facts.begin(folder / "run", artifact, "train.py", prepared(), DEVICES, after, np.int64(50))  # type: ignore[arg-type]
    facts: dict[str, Any] = json.loads((folder / "run" / "run.json").read_text())
    return facts


def test_run_json_keeps_starts_of_resumed_run_and_drops_them_for_new_run(tmp_path: Path) -> None:
    facts = begin(tmp_path)
    assert facts["name"] == "artifact" and facts["data"]["train"]["tokens"] == 60
    assert facts["devices"] == DEVICES and facts["accumulation"] == 2
    assert [(one["after"], one["until"]) for one in facts["starts"]] == [(0, 50)]
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "recipe: 1  # 0\n"
    again = begin(tmp_path, np.int64(20))
    assert [one["after"] for one in again["starts"]] == [0, 20]
    assert (tmp_path / "run" / "recipe.yaml").read_text() == "recipe: 1  # 0\n", "as the run began"
    assert [one["after"] for one in begin(tmp_path)["starts"]] == [0], "a new run"


def test_damaged_run_json_is_replaced(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "run" / "run.json").write_text('{"run": 1, "sta')
    assert [one["after"] for one in begin(tmp_path, 20)["starts"]] == [20]


def test_unwritable_run_json_gives_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("in the way")
    run_facts.begin(tmp_path / "run", tmp_path, "train.py", prepared(), DEVICES, 0, 50)
    assert "run.json cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("values", [[5], [5, 5, 5], list(range(1, 18)), [1, 100_000], [7] * 9 + [4096]])
def test_length_histogram_counts_every_sample(values: list[int]) -> None:
    found = run_facts.lengths(np.array(values))
    assert sum(found["counts"]) == len(values) and len(found["edges"]) == len(found["counts"]) + 1
    assert len(found["counts"]) <= run_facts.BARS
    assert found["edges"][0] == min(values) and found["edges"][-1] > max(values)
    for low, high, count in zip(found["edges"], found["edges"][1:], found["counts"], strict=False):
        assert count == sum(low <= value < high for value in values)
    assert run_facts.lengths(np.array([], int)) == {"edges": [], "counts": [], "percentiles": {}}


def test_repeated_merge_of_a_step_replaces_its_entry(tmp_path: Path) -> None:
    def entries() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads((tmp_path / "merges.json").read_text())
        return found

    entry = {"step": 10, "folder": "/merged", "bytes": 5, "verified": None}
    run_facts.merged(tmp_path, entry)
    run_facts.merged(tmp_path, entry | {"verified": {"files": 3}})
    run_facts.merged(tmp_path, entry | {"step": 20})
    run_facts.merged(tmp_path, entry)
    assert [(one["step"], one["verified"]) for one in entries()] == [(20, None), (10, {"files": 3})]
    run_facts.merged(tmp_path, entry | {"bytes": 6})
    assert entries()[-1]["verified"] is None, "another merge, which nobody has verified"


def test_merges_that_cannot_be_read_now_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = {"step": 10, "folder": "/merged", "verified": None}
    run_facts.merged(tmp_path, entry)

    def busy(directory: object) -> None:
        raise ConnectionError("the store is busy")

    with monkeypatch.context() as patched:
        patched.setattr(run_facts, "path_of", busy)
        run_facts.merged(tmp_path, entry | {"step": 20})
    assert "merges.json cannot be written: the store is busy" in capsys.readouterr().err
    assert [one["step"] for one in json.loads((tmp_path / "merges.json").read_text())] == [10]
