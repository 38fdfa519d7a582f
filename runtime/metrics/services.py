"""The services that a recipe's numbers go to beside its files: Weights & Biases and MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from ..settings import TrainSettings


class Service(Protocol):
    """A run of a service.

    Attributes:
        status: the exit status that it is finished with; a failure's until it is set.
        stopped: whether it may go on later.
    """

    status: int
    stopped: bool

    def log(self, mode: str, step: int, values: Mapping[str, float]) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...


def open_services(
    train: TrainSettings, folder: Path, directory: str | Path, artifact: Path, resume: bool, restored: int
) -> list[Service]:
    """The run in each service that a recipe names, and that can be reached.

    Args:
        folder: of metrics.jsonl, as it was before this process.
        directory: of the checkpoints, local or gs://.
        artifact: folder of recipe.lock.json.
        resume: whether the run that is noted beside the checkpoints goes on.
        restored: the step that it goes on after, 0 at the beginning.
    """
    found: list[Service | None] = []
    place = (folder, directory, artifact, resume, restored)
    if train.wandb_project is not None:
        from .wandb_log import open_wandb

        found.append(open_wandb(train.wandb_project, *place))
    if train.mlflow_experiment is not None:
        from .mlflow_log import open_mlflow

        found.append(open_mlflow(train.mlflow_experiment, *place))
    return [service for service in found if service is not None]
