"""Log the numbers of metrics.jsonl to MLflow, for a recipe with train.log.mlflow_experiment.

MLFLOW_TRACKING_URI gives the server; MLFLOW_EXPERIMENT_NAME overrides the recipe. The names of numbers are
those of TensorBoard's files: "train/loss", "eval/loss". The run's id is kept in mlflow.json next to the
checkpoints, so a resumed run continues in the same one. Repeated steps, which give the same numbers, are not
logged twice.

No failure here ends a run: it prints one sentence, and metrics.jsonl has the numbers.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import first_line
from .loggers import FILE as METRICS
from .loggers import read_entries
from .replay import Logged, keep, kept, last_steps, replay

FILE = "mlflow.json"
MOST_METRICS, MOST_PARAMS, LONGEST = 1000, 100, 6000
"""MLflow's limits for one request, and for the characters of a parameter."""
PAUSE = 2.0
"""Seconds between two requests during a run."""
DEFAULTS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
}
"""Defaults of MLflow's own variables: do not wait for an unresponsive server until the run is over."""


class MLflow(Logged):
    """Log to a run of MLflow.

    Args:
        client: mlflow's `MlflowClient()`.
        run: the run's id.
        logged: as of `Logged`.
    """

    name = "MLflow"

    def __init__(self, client: Any, run: str, logged: Mapping[str, int]) -> None:
        super().__init__(run, logged)
        self._client = client
        self._waiting: list[Any] = []
        self._sent = 0.0

    def log(self, mode: str, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one step, unless the run already has them."""
        if not self.wants(mode, step):
            return
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._waiting += [
            Metric(key(f"{mode}/{name}"), float(value), now, step) for name, value in values.items()
        ]
        if time.monotonic() - self._sent > PAUSE:
            self.flush()

    def flush(self) -> None:
        """Send pending numbers."""
        waiting, self._waiting = self._waiting, []
        with self.surviving("the rest of the run is not logged there"):
            for some in _cut(waiting, MOST_METRICS):
                self._client.log_batch(self._run, metrics=some)
        self._sent = time.monotonic()

    def close(self) -> None:
        """Send the rest, and end the run in MLflow."""
        self.flush()
        if self._run is not None:
            ends = "KILLED" if self.stopped else "FAILED" if self.status else "FINISHED"
            with self.surviving("the run stays open there"):
                self._client.set_terminated(self._run, ends)


def open_mlflow(
    experiment: str, folder: Path, directory: str | Path, artifact: Path, resume: bool, restored: int
) -> MLflow | None:
    """Open the run in MLflow; print a sentence and return None if that fails.

    Args:
        experiment: train.log.mlflow_experiment, unless MLFLOW_EXPERIMENT_NAME says otherwise.
        folder: folder of metrics.jsonl from before this process.
        directory: the checkpoint directory, local or gs://, with mlflow.json.
        artifact: folder of recipe.lock.json.
        resume: whether to continue the run that mlflow.json names.
        restored: the step after which the run continues, 0 at the beginning.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        return MLflow.not_logged("MLFLOW_TRACKING_URI names no server")
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    try:
        import mlflow
    except ImportError:
        return MLflow.not_logged("the package mlflow-skinny is not installed")
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
    try:
        return _open(mlflow.MlflowClient(), name, folder, directory, artifact, resume, restored)
    except Exception as error:  # any error of mlflow, its server or its settings
        return MLflow.not_logged(first_line(error))


def _open(
    client: Any,
    experiment: str,
    folder: Path,
    directory: str | Path,
    artifact: Path,
    resume: bool,
    restored: int,
) -> MLflow:
    before = kept(directory, FILE) if resume else {}
    entries = [entry for _, entry in read_entries(folder / METRICS)]
    if before.get("experiment") == experiment and "id" in before:
        client.update_run(before["id"], "RUNNING")
        return MLflow(client, before["id"], last_steps(entries))
    found = client.get_experiment_by_name(experiment)
    place = found.experiment_id if found else client.create_experiment(experiment)
    run = client.create_run(place, run_name=artifact.name).info.run_id
    keep(directory, FILE, {"experiment": experiment, "id": run})
    record = json.loads((artifact / "recipe.lock.json").read_text(encoding="utf-8"))
    for some in _cut(list(_leaves({"recipec": record["compiler"], **record["recipe"]})), MOST_PARAMS):
        client.log_batch(run, params=_params(some))
    logger = MLflow(client, run, {})
    for entry in entries:
        if entry["step"] <= restored:
            replay(logger, entry)
    return logger


def key(name: str) -> str:
    """Return a metric's name in MLflow's characters (letters, digits, _ - . / : space), path normalized."""
    return posixpath.normpath(re.sub(r"[^\w. /:-]|\.\.", "_", name))


def _cut(values: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    for start in range(0, len(values), most):
        yield values[start : start + most]


def _params(leaves: Sequence[tuple[str, Any]]) -> list[Any]:
    from mlflow.entities import Param

    return [
        Param(key(name), (value if isinstance(value, str) else json.dumps(value))[:LONGEST])
        for name, value in leaves
    ]


def _leaves(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value
