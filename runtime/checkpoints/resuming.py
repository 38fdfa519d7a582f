"""Find what a run continues from: the newest intact checkpoint (damaged ones are skipped), and its data.

runtime.checkpoints.saving describes the content of a checkpoint's folder.
"""

from __future__ import annotations

import errno
import hashlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from etils import epath

from ..addresses import path_of, reached
from ..errors import UserError
from . import manifest
from .record import check_data_state
from .saved_steps import ITEM, step_folders

OPTIMIZER = "optimizer_state"
METADATA = "_CHECKPOINT_METADATA"
"""Orbax's name of the file that holds a step's own metadata, under `custom_metadata`."""
DATA = "data"
CHECK = "data_sha256"
"""The digest of `data`, together with `evaluations` if there are any."""
EVALUATIONS = "evaluations"
"""The fields of runtime.training.early_stopping.Evaluations, if the run evaluates."""
IMPORTED = "imported"
"""Replaces `data` if runtime.peft.importing made the step; CHECK is then its digest."""
CORRUPT = "corrupt-"
DAMAGED = (errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.EILSEQ, errno.EUCLEAN)
"""System errors that mean a damaged file, rather than a file that cannot be read at the moment."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoints that a run can be continued from.

    Attributes:
        step: the newest intact one, None if there are no checkpoints.
        data: the state of the data that was saved with it.
        damaged: newer steps, the newest first, and what is wrong with each.
        imported: where the adapters of step 0 came from; None if this program trained them.
        evaluations: the counts of the run's evaluations, None if there are none.
    """

    step: int | None = None
    data: Mapping[str, Any] | None = None
    damaged: tuple[tuple[int, str], ...] = ()
    imported: Mapping[str, Any] | None = None
    evaluations: Mapping[str, Any] | None = None


def describe(data: Mapping[str, Any], evaluations: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Make a step's own metadata.

    Args:
        data: the state of the data, of JSON values.
        evaluations: the counts of the run's evaluations.
    """
    state = {DATA: dict(data)} | ({EVALUATIONS: dict(evaluations)} if evaluations else {})
    plain: dict[str, Any] = json.loads(json.dumps(state))
    return {**plain, CHECK: _checked(plain)}


def _checked(metadata: Mapping[str, Any]) -> str:
    """Return the digest that a step's metadata should have."""
    if EVALUATIONS in metadata:
        return digest([metadata[DATA], metadata[EVALUATIONS]])
    return digest(metadata[IMPORTED if IMPORTED in metadata else DATA])


def find(directory: str) -> ResumePoint:
    """Find the newest step whose files are, byte for byte, those that were saved.

    Raises:
        UserError: when there are steps, but none is intact; or when they cannot be read.
    """
    damaged: list[tuple[int, str]] = []
    for step in reversed(step_folders(directory)):
        try:
            with reached(directory):
                reason, metadata = examine(path_of(directory) / str(step))
        except OSError as error:
            raise UserError(
                f"{directory}: the checkpoint of step {step} cannot be read: {error.strerror or error}",
                "allow this process to read it",
            ) from error
        if reason is None:
            return ResumePoint(
                step,
                metadata.get(DATA),
                tuple(damaged),
                metadata.get(IMPORTED),
                metadata.get(EVALUATIONS),
            )
        damaged.append((step, reason))
    if damaged:
        raise UserError(
            f"{directory}: none of its checkpoints is complete: "
            + "; ".join(f"step {step}: {reason}" for step, reason in damaged),
            "restore one from a copy, or start again without --resume in another --output",
        )
    return ResumePoint()


def examine(folder: epath.Path) -> tuple[str | None, Mapping[str, Any]]:
    """Return what is wrong with a step's folder (None for nothing), and the step's own metadata.

    Raises:
        OSError: when it cannot be read for a reason other than damage.
    """
    try:
        if not any(folder.iterdir()):
            return "its folder is empty", {}
        for item in (ITEM,) if _is_imported(folder) else (ITEM, OPTIMIZER):
            reason = manifest.damage(folder / item)
            if reason is not None:
                return reason, {}
        metadata = _metadata(folder)
        if metadata[CHECK] != _checked(metadata):
            return f"{METADATA} is damaged", {}
        return None, metadata
    except FileNotFoundError:
        return f"{METADATA} is missing", {}
    except OSError as error:
        if error.errno not in DAMAGED:
            raise
        return str(error.strerror), {}
    except (ValueError, KeyError, TypeError):
        return f"{METADATA} is damaged", {}


def _metadata(folder: epath.Path) -> Mapping[str, Any]:
    metadata = json.loads((folder / METADATA).read_text())["custom_metadata"]
    if not isinstance(metadata, dict):
        raise TypeError(metadata)
    return metadata


def _is_imported(folder: epath.Path) -> bool:
    """Return whether a step's metadata says that it was imported, and so has no optimizer state."""
    try:
        return folder.name == "0" and IMPORTED in _metadata(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def set_aside(directory: str, point: ResumePoint) -> None:
    """Rename damaged steps to corrupt-STEP, so that training can save those steps again, and say so.

    Raises:
        UserError: when one cannot be renamed.
    """
    root = path_of(directory)
    for step, reason in point.damaged:
        target, count = root / f"{CORRUPT}{step}", 1
        while target.exists():
            count += 1
            target = root / f"{CORRUPT}{step}-{count}"
        try:
            with reached(directory, "written"):
                (root / str(step)).rename(target)
        except OSError as error:
            raise UserError(
                f"{root / str(step)}: is damaged ({reason}) and cannot be renamed: {error.strerror or error}",
                "move it away",
            ) from error
        print(
            f"note: the checkpoint of step {step} is damaged ({reason}); it is now {target.name}, "
            f"and training continues from step {point.step}",
            file=sys.stderr,
        )


def check_data(directory: str, point: ResumePoint, current: Mapping[str, Any]) -> None:
    """Check that the data is the data that a checkpoint was trained on.

    Args:
        current: the state of the data at the same step, as it is read now.

    Raises:
        UserError: naming what differs.
    """
    check_data_state(f"{directory}: the checkpoint of step {point.step}", point.data or {}, current)


def digest(state: Any) -> str:
    """Return the SHA-256 of a JSON value."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()
