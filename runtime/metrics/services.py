"""The services that also get a recipe's metrics: Weights & Biases and MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ..settings import TrainSettings


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


def open_services(
    train: TrainSettings, folder: Path, directory: str | Path, artifact: Path, resume: bool, restored: int
) -> list[Service]:
    """Open the run in each service that a recipe names and that can be reached.

    Args:
        folder: folder of metrics.jsonl from before this process.
        directory: the checkpoint directory, local or gs://.
        artifact: folder of recipe.lock.json.
        resume: whether to continue the run that is recorded next to the checkpoints.
        restored: the step after which the run continues, 0 at the beginning.
    """
    found: list[Service | None] = []
    place = (folder, directory, artifact, resume, restored)
    if train.log.wandb_project is not None:
        from .wandb_log import open_wandb

        found.append(open_wandb(train.log.wandb_project, *place))
    if train.log.mlflow_experiment is not None:
        from .mlflow_log import open_mlflow

        found.append(open_mlflow(train.log.mlflow_experiment, *place))
    return [service for service in found if service is not None]
