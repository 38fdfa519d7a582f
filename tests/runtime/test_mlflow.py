"""Tests of a run's numbers in MLflow, with a fake client that has the parts that the runtime uses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from recipec.runtime.metrics.loggers import Metrics
from recipec.runtime.metrics.services import RunFiles, open_services
from recipec.runtime.sections import Log
from recipec.runtime.settings import TrainSettings
from tests.runtime.logged import assert_same, of_lines

TRAIN = TrainSettings(global_batch_size=8, micro_batch_size=1, log=Log(mlflow_experiment="support"))
LOCK = {"compiler": "recipec 0", "recipe": {"name": "tiny", "lora": {"rank": 4, "targets": ["q_proj"]}}}


class Client:
    """mlflow's client of a server that exists as long as the class."""

    runs: ClassVar[dict[str, SimpleNamespace]] = {}
    fails = False

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str, run_name: str) -> SimpleNamespace:
        id = f"run-{len(self.runs)}"
        found = SimpleNamespace(info=SimpleNamespace(run_id=id), experiment=experiment, name=run_name)
        found.numbers, found.params, found.status, found.ended = {}, {}, "RUNNING", 0
        self.runs[id] = found
        return found

    def update_run(self, id: str, status: str) -> None:
        self.runs[id].status = status

    def set_terminated(self, id: str, status: str) -> None:
        self.runs[id].ended += 1
        self.update_run(id, status)

    def log_batch(self, id: str, metrics: Any = (), params: Any = ()) -> None:
        if self.fails:
            raise RuntimeError("no answer\nof the server")
        assert len(metrics) <= 1000 and len(params) <= 100
        for name, value, _, step in metrics:
            assert (name, step) not in self.runs[id].numbers, "a step twice"
            self.runs[id].numbers[name, step] = value
        self.runs[id].params.update(params)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> dict[str, SimpleNamespace]:
    """Return the runs of a server, by their ids."""
    mlflow, entities = ModuleType("mlflow"), ModuleType("mlflow.entities")
    mlflow.MlflowClient = Client  # type: ignore[attr-defined]
    entities.Metric = lambda *parts: parts  # type: ignore[attr-defined]
    entities.Param = lambda *parts: parts  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", mlflow)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setattr(Client, "runs", {})
    return Client.runs


def opened(tmp_path: Path, start: int, resume: bool = False) -> Metrics:
    artifact, folder = tmp_path / "tiny", tmp_path / "run"
    artifact.mkdir(exist_ok=True)
    (artifact / "recipe.lock.json").write_text(json.dumps(LOCK))
    services = open_services(TRAIN, RunFiles(folder, folder, artifact, resume, start))
    return Metrics(folder, start or None, False, services)


LOSSES = {"loss": 2.0, "chat": 3.0}
REWARDS = {"reward": 0.5, "reward/vowels": 0.25, "reward_std/vowels": 0.1, "chat/reward": 0.75}


def log(
    tmp_path: Path, start: int, until: int, resume: bool = False, measured: Any = LOSSES, **ends: Any
) -> Path:
    """Log the steps after `start`, and return the run's folder.

    Args:
        measured: the numbers of an evaluation.
    """
    metrics = opened(tmp_path, start, resume)
    for step in range(start + 1, until + 1):
        metrics.log("train", step, {"loss": float("nan") if step == 2 else 1.0 / step, "tokens": 7})
        if step % 2 == 0:
            metrics.log("eval", step, {name: value / step for name, value in measured.items()})
    metrics.ends(**{"status": 0, **ends})
    metrics.close()
    return metrics.path.parent


@pytest.mark.parametrize(("measured", "name"), [(LOSSES, "eval/chat"), (REWARDS, "eval/reward/vowels")])
def test_resumed_run_continues_same_mlflow_run(
    measured: dict[str, float], name: str, tmp_path: Path, runs: dict[str, SimpleNamespace]
) -> None:
    folder = log(tmp_path, 0, 5, measured=measured, status=143, stopped=True)
    (run,) = runs.values()
    assert (run.experiment, run.name, run.status, run.ended) == ("support", "tiny", "KILLED", 1)
    assert run.params["lora.rank"] == "4" and run.params["lora.targets"] == '["q_proj"]'
    assert (name, 4) in run.numbers
    log(tmp_path, 4, 8, resume=True, measured=measured)
    assert list(runs.values()) == [run] and run.status == "FINISHED"
    assert_same(run.numbers, of_lines(folder))
    log(tmp_path, 0, 1)
    assert len(runs) == 2, "begun anew"


def test_mlflow_failures_do_not_end_run(
    tmp_path: Path,
    runs: dict[str, SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Client, "fails", True)
    folder = log(tmp_path, 0, 3)
    rest = "metrics.jsonl has all values"
    assert capsys.readouterr().err == f"note: MLflow: no answer; nothing is logged there; {rest}\n"
    monkeypatch.setitem(sys.modules, "mlflow", None)
    log(tmp_path, 0, 3)
    said = f"note: MLflow: the package mlflow-skinny is not installed; nothing is logged there; {rest}\n"
    assert capsys.readouterr().err == said
    assert ("train/loss", 3) in of_lines(folder)
