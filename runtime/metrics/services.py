"""Log the numbers of metrics.jsonl to services: Weights & Biases (train.log.wandb_project) and MLflow
(train.log.mlflow_experiment).

The names of numbers are those of TensorBoard's files: "train/loss", "eval/loss". The run's id in a service is
kept in a file next to the checkpoints (wandb.json, mlflow.json), so a resumed run continues in the same one.
Repeated steps, which give the same numbers, are not logged twice.

No failure here ends a run: it prints one sentence, and metrics.jsonl has the numbers.

Weights & Biases: without a key or an answer from the server the run is recorded on this disk, for
`wandb sync`. wandb's own variables (WANDB_MODE, WANDB_PROJECT, WANDB_ENTITY, WANDB_DIR and so on) apply. The
key comes from them or from ~/.netrc, and from nowhere else.

MLflow: MLFLOW_TRACKING_URI gives the server; MLFLOW_EXPERIMENT_NAME overrides the recipe.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import secrets
import string
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from etils import epath

from ..errors import first_line
from ..settings import TrainSettings
from .loggers import CRITERIA, EVAL, read_entries
from .loggers import FILE as METRICS

WHOLE = "metrics.jsonl has all values"
Entry = Mapping[str, Any]
"""A line of metrics.jsonl."""


class Service(Protocol):
    """A run in a service.

    Attributes:
        status: the exit status of the run; until it is set, that of a failure.
        stopped: whether the run may continue later.
    """

    status: int
    stopped: bool

    def log(self, mode: str, step: int, values: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class RunFiles:
    """The files of a run, and where it continues.

    Attributes:
        folder: folder of metrics.jsonl from before this process; wandb's own files are written there too.
        directory: the checkpoint directory, local or gs://.
        artifact: folder of recipe.lock.json.
        resume: whether to continue the run of a service that is recorded next to the checkpoints.
        restored: the step after which the run continues, 0 at the beginning.
    """

    folder: Path
    directory: str | Path
    artifact: Path
    resume: bool
    restored: int

    @property
    def entries(self) -> list[Entry]:
        """Return the lines of metrics.jsonl."""
        return [entry for _, entry in read_entries(self.folder / METRICS)]

    @property
    def recipe(self) -> dict[str, Any]:
        """Return the recipe of the artifact, with the compiler's version as "recipec"."""
        record = json.loads((self.artifact / "recipe.lock.json").read_text(encoding="utf-8"))
        return {"recipec": record["compiler"], **record["recipe"]}

    def recorded(self, file: str) -> dict[str, Any]:
        """Return the content of a service's file next to the checkpoints: the run to continue, or nothing."""
        if not self.resume:
            return {}
        try:
            content = json.loads((epath.Path(self.directory) / file).read_text())
        except (OSError, ValueError):
            return {}
        return content if isinstance(content, dict) else {}

    def record(self, file: str, values: Mapping[str, Any]) -> None:
        """Write a service's file next to the checkpoints."""
        epath.Path(self.directory).mkdir(parents=True, exist_ok=True)
        (epath.Path(self.directory) / file).write_text(json.dumps(values, indent=2) + "\n")

    def replay(self, service: Service) -> None:
        """Log the lines of metrics.jsonl that earlier processes wrote, up to the restored step."""
        for entry in self.entries:
            if entry["step"] <= self.restored:
                values = {
                    name.removeprefix("eval_").removeprefix(EVAL): (
                        float(value) if isinstance(value, str) else value
                    )
                    for name, value in entry.items()
                    if name != "step"
                }
                service.log(mode_of(entry), entry["step"], values)


def mode_of(entry: Entry) -> str:
    """Return "train" or "eval"."""
    return "eval" if any(criterion.name in entry for criterion in CRITERIA) else "train"


def last_steps(entries: Sequence[Entry]) -> dict[str, int]:
    """Return the last step of each mode."""
    steps: dict[str, int] = {}
    for entry in entries:
        steps[mode_of(entry)] = max(entry["step"], steps.get(mode_of(entry), 0))
    return steps


class Logged:
    """A run in a service. No failure of the service ends the run: the first one stops logging there.

    Args:
        run: the service's run.
        logged: the last step of each mode that the run already has.

    Attributes:
        name: of the service, for notes.
        status, stopped: as in `Service`.
    """

    name: ClassVar[str]

    def __init__(self, run: Any, logged: Mapping[str, int]) -> None:
        self.status, self.stopped = 1, False
        self._run, self._logged = run, dict(logged)

    @classmethod
    def say(cls, what: str) -> None:
        """Print a note."""
        print(f"note: {cls.name}: {what}", file=sys.stderr, flush=True)

    @classmethod
    def not_logged(cls, reason: str) -> None:
        """Say that nothing is logged there."""
        cls.say(f"{reason}; nothing is logged there; {WHOLE}")

    def wants(self, mode: str, step: int) -> bool:
        """Return whether the run lacks the numbers of a step, and can be logged to."""
        return self._run is not None and step > self._logged.get(mode, -1)

    @contextmanager
    def surviving(self, otherwise: str) -> Iterator[None]:
        """Turn a failure of the service within the block into a sentence, and stop logging to it.

        Args:
            otherwise: what happens to the numbers instead.
        """
        try:
            yield
        except Exception as error:
            self._run = None
            self.say(f"{first_line(error)}; {otherwise}; {WHOLE}")


WANDB_FILE = "wandb.json"

INIT_SECONDS = 30.0
"""Seconds without the server's answer after which a run is recorded on this disk; WANDB_INIT_TIMEOUT."""
FINISH_SECONDS = 60.0
"""Seconds to send remaining data when the run has ended; WANDB_FINISH_TIMEOUT."""


class WandB(Logged):
    """Log to a run of Weights & Biases.

    Args:
        run, logged: as of `Logged`.
        teardown: ends wandb's own process.
    """

    name = "Weights & Biases"

    def __init__(self, run: Any, logged: Mapping[str, int], teardown: Callable[[], None]) -> None:
        super().__init__(run, logged)
        self._teardown: Callable[[], None] | None = teardown

    def log(self, mode: str, step: int, values: Mapping[str, float]) -> None:
        """Log the numbers of one step, unless the run already has them."""
        if not self.wants(mode, step):
            return
        named = {
            f"{mode}/{name}": value if isinstance(value, int) else float(value)
            for name, value in values.items()
        }
        with self.surviving("the rest of the run is not logged there"):
            self._run.log(named, step=step)

    def flush(self) -> None:
        """Do nothing: wandb writes by itself, in its own process."""

    def close(self) -> None:
        """End the run in wandb; data that cannot be sent in time stays on this disk."""
        run, teardown = self._run, self._teardown
        self._run = self._teardown = None
        if run is not None:
            folder = Path(run.settings.sync_dir)
            with self.surviving(f"`wandb sync {folder}` sends what is missing"):
                if self.stopped:
                    run.mark_preempting()
                run.finish(exit_code=self.status)
                if run.settings.mode in ("offline", "dryrun"):
                    self.say(f"recorded in {folder}; `wandb sync {folder}` uploads it")
        if teardown is not None:
            # Otherwise it ends at exit, where it prints its own failures and sets the status.
            with suppress(Exception, SystemExit):
                teardown()


def open_wandb(project: str, files: RunFiles) -> WandB | None:
    """Open the run in Weights & Biases; print a sentence and return None if that fails.

    Args:
        project: train.log.wandb_project, unless WANDB_PROJECT says otherwise.
    """
    # This comes before the import of wandb, which prints while it reads its settings.
    os.environ.setdefault("WANDB_SILENT", "true")
    try:
        import wandb
    except ImportError:
        return WandB.not_logged("the package wandb is not installed")
    try:
        return _wandb_run(wandb, project, files)
    except Exception as error:  # any error of wandb, its server or its settings
        return WandB.not_logged(first_line(error))


def _wandb_run(wandb: Any, project: str, files: RunFiles) -> WandB | None:
    settings = wandb.setup().settings
    if settings.mode == "disabled":
        return None
    place = {"entity": settings.entity, "project": settings.project or project}
    before = files.recorded(WANDB_FILE)
    continues = all(before.get(name) == value for name, value in place.items()) and "id" in before
    id = settings.run_id or (before["id"] if continues else _new_id())
    continues = continues and before["id"] == id
    files.folder.mkdir(parents=True, exist_ok=True)
    arguments = {
        **place,
        "id": id,
        "name": settings.run_name or files.artifact.name,
        "dir": None if os.environ.get("WANDB_DIR") else str(files.folder),
        "config": files.recipe,
        "resume": "allow",
        "settings": wandb.Settings(
            console="off",
            init_timeout=_seconds("WANDB_INIT_TIMEOUT", INIT_SECONDS),
            finish_timeout=_seconds("WANDB_FINISH_TIMEOUT", FINISH_SECONDS),
            finish_timeout_raises=True,
        ),
    }
    run = _begin(wandb, settings.mode, arguments)
    if run.settings.mode not in ("offline", "dryrun") and run.url:
        print(f"Weights & Biases: {run.url}", file=sys.stderr, flush=True)
    files.record(WANDB_FILE, {**place, "id": id})
    if continues:
        return WandB(run, last_steps(files.entries), wandb.teardown)
    logger = WandB(run, {}, wandb.teardown)
    files.replay(logger)
    return logger


def _begin(wandb: Any, mode: str, arguments: Mapping[str, Any]) -> Any:
    """Begin wandb's run at its server, or on this disk if there is no key or no answer."""
    if mode in ("offline", "dryrun"):
        return wandb.init(**arguments)
    # Never ask for the key: an unattended run would wait for it.
    if not wandb.login(prompt=False, verify=False):
        WandB.say("no key (`wandb login`, or WANDB_API_KEY); the run is recorded on this disk")
        return wandb.init(mode="offline", **arguments)
    try:
        return wandb.init(**arguments)
    except wandb.errors.CommError as error:
        WandB.say(f"{first_line(error)}; the run is recorded on this disk")
        wandb.teardown()  # the id would be taken
        return wandb.init(mode="offline", **arguments)


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def _seconds(variable: str, otherwise: float) -> float:
    return float(os.environ.get(variable) or otherwise)


MLFLOW_FILE = "mlflow.json"
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


def open_mlflow(experiment: str, files: RunFiles) -> MLflow | None:
    """Open the run in MLflow; print a sentence and return None if that fails.

    Args:
        experiment: train.log.mlflow_experiment, unless MLFLOW_EXPERIMENT_NAME says otherwise.
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
        return _mlflow_run(mlflow.MlflowClient(), name, files)
    except Exception as error:  # any error of mlflow, its server or its settings
        return MLflow.not_logged(first_line(error))


def _mlflow_run(client: Any, experiment: str, files: RunFiles) -> MLflow:
    before = files.recorded(MLFLOW_FILE)
    if before.get("experiment") == experiment and "id" in before:
        client.update_run(before["id"], "RUNNING")
        return MLflow(client, before["id"], last_steps(files.entries))
    known = client.get_experiment_by_name(experiment)
    place = known.experiment_id if known else client.create_experiment(experiment)
    run = client.create_run(place, run_name=files.artifact.name).info.run_id
    files.record(MLFLOW_FILE, {"experiment": experiment, "id": run})
    for some in _cut(list(_leaves(files.recipe)), MOST_PARAMS):
        client.log_batch(run, params=_params(some))
    logger = MLflow(client, run, {})
    files.replay(logger)
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


def open_services(train: TrainSettings, files: RunFiles) -> list[Service]:
    """Open the run in each service that a recipe names and that can be reached."""
    opened: list[Service | None] = []
    if train.log.wandb_project is not None:
        opened.append(open_wandb(train.log.wandb_project, files))
    if train.log.mlflow_experiment is not None:
        opened.append(open_mlflow(train.log.mlflow_experiment, files))
    return [service for service in opened if service is not None]
