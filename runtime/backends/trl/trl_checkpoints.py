"""The checkpoints that the Trainer writes: which exist, and which data they were trained on."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...checkpoints.record import LOCK, check_data_state, check_record
from ...errors import UserError
from ...interrupts import name_of
from ...training.early_stopping import Evaluations

TRAINED = "trained.safetensors"
"""File of the trained parameters, unless FSDP writes shards."""
DATA = "data.json"
"""File of the position in the data."""
LAST = "trainer_state.json"
"""The Trainer's own file, which it writes last."""


def checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints of a run by step, in ascending order.

    A checkpoint whose writing was cut off lacks the file that is written last, and is ignored.
    """
    if not directory.is_dir():
        return {}
    steps = {}
    for folder in directory.iterdir():
        match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
        if match and (folder / LAST).is_file():
            steps[int(match[1])] = folder
    return dict(sorted(steps.items()))


def open_run(directory: Path, artifact: Path, resume: bool) -> tuple[int, Path | None]:
    """Return the step and the folder of the newest checkpoint, or 0 and None for a new run.

    Args:
        directory: of the run's checkpoints.
        artifact: folder with recipe.lock.json.

    Raises:
        UserError: the directory holds a run and `resume` is false, or it holds another artifact's run.
    """
    steps = checkpoints(directory)
    if steps and not resume:
        raise UserError(
            f"{directory} already holds checkpoints, the newest of step {max(steps)}",
            "--resume continues that run; for a new one choose another checkpoint.directory, or --output",
        )
    if (
        resume
        and (directory / LOCK).is_file()
        and check_record(directory, artifact, max(steps, default=None))
    ):
        raise UserError(
            f"{directory} holds a run of another length or schedule, and train_trl.py cannot change them",
            "continue it with the artifact that started it, or choose another checkpoint.directory",
        )
    return (max(steps), steps[max(steps)]) if steps else (0, None)


def data_state(folder: Path) -> dict[str, Any]:
    """Read the position in the data that was saved with a checkpoint.

    Raises:
        UserError: it cannot be read.
    """
    try:
        saved: dict[str, Any] = json.loads((folder / DATA).read_text(encoding="utf-8"))
        return saved
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{folder / DATA}: cannot be read ({error})", "remove the checkpoint") from None


def check_data(folder: Path, saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Check that the data is the same as when a checkpoint was trained.

    Args:
        saved: `data_state` of the checkpoint.
        current: the state of the current data at the same step.

    Raises:
        UserError: the data differs; the message says in what.
    """
    check_data_state(str(folder), saved, current)


def evaluations(folder: Path) -> Evaluations:
    """Return the state of early stopping at a checkpoint, if the recipe has it."""
    try:
        state = json.loads((folder / LAST).read_text(encoding="utf-8"))
        without = state["stateful_callbacks"]["Stopping"]["attributes"]["early_stopping_patience_counter"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return Evaluations()
    return Evaluations(1, state.get("best_metric"), state.get("best_global_step"), without)


def farewell(signum: int, directory: Path) -> str:
    """Return the message about a run that a signal ended."""
    steps = checkpoints(directory)
    if not steps:
        return f"stopped by {name_of(signum)}; no checkpoint was saved yet"
    return (
        f"stopped by {name_of(signum)}; kept: the checkpoint of step {max(steps)} in {directory}; "
        "--resume continues from it"
    )
