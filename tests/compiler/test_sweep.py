"""Tests of `recipe sweep`: its combinations, started and skipped runs, and its table."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.compiler.commands import recipe

OVER = ["--over", "lora.rank=[8, 16]", "--over", "train.optimizer.learning_rate=[1e-4, 2e-4]"]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Return the names of the artifacts whose train.py was started. Among them, rank 16 is better."""
    names: list[str] = []

    def opened(name: str, relative_to: Path = Path()) -> Path:
        """Replace a bucket by a folder next to the runs."""
        return tmp_path / name.removeprefix("gs://") if "://" in name else relative_to / name

    monkeypatch.setattr("recipec.compiler.report.run_folder.open_address", opened)

    def run(command: list[str], cwd: Path) -> Any:
        names.append(cwd.name)
        assert command[1:4] == ["train.py", "--resume", "--data-dir"]
        lock = json.loads((cwd / "recipe.lock.json").read_text())["recipe"]
        loss = 1 / lock["lora"]["rank"] + lock["train"]["optimizer"]["learning_rate"]
        folder = opened(lock["checkpoint"]["directory"], cwd)
        folder.mkdir(parents=True)
        lines = [{"step": 1, "loss": 3 * loss}, {"step": 1, "eval_loss": loss}]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "state.json").write_text('{"state": "done"}')
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    return names


@pytest.mark.parametrize("directory", ["run", "gs://bucket/run"])
def test_sweep_runs_each_combination_once_and_lists_the_best_first(
    recipe_file: Path, tmp_path: Path, started: list[str], directory: str
) -> None:
    arguments = [recipe_file, *OVER, "-o", tmp_path / "out", "--set", f"checkpoint.directory={directory}"]
    status, printed, errors = recipe("sweep", *arguments)
    assert status == 0, errors
    assert started == [f"example-{number}" for number in range(1, 5)]
    rows = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert rows["by"] == "best_eval_loss"
    first = rows["runs"][0]
    assert (first["lora.rank"], first["train.optimizer.learning_rate"], first["at_step"]) == (16, 1e-4, 1)
    assert printed.splitlines()[2].split()[:3] == ["example-3", "16", "0.0001"]

    status, _, errors = recipe("sweep", *arguments)
    assert status == 0 and errors.count("completed already") == 4 and len(started) == 4


def test_invalid_sweep_starts_no_run(recipe_file: Path, tmp_path: Path, started: list[str]) -> None:
    wrong = [recipe_file, "--over", "lora.rank=[8, 0]", "-o", tmp_path / "other"]
    status, _, errors = recipe("sweep", *wrong)
    assert status == 1 and "lora.rank=0" in errors and "E0105" in errors
    assert not started and not (tmp_path / "other").exists()
    assert recipe("sweep", recipe_file, "--over", "lora.rank", "-o", tmp_path / "other")[0] == 2
    twice = ("--over", "lora.rank=[8]", "--over", "lora.rank=[16]")
    status, _, errors = recipe("sweep", recipe_file, *twice, "-o", tmp_path / "other")
    assert status == 2 and "is given twice" in errors
    assert recipe("sweep", recipe_file, "--over", "name=[a, b]", "-o", tmp_path / "other")[0] == 2
    status, _, errors = recipe("sweep", recipe_file, "--over", "lora.rank=[2024-01-01]")
    assert status == 1 and "E0103" in errors
    status, _, errors = recipe("sweep", *wrong, "--launch", "sky 'jobs")
    assert status == 2 and "No closing quotation" in errors and not started
