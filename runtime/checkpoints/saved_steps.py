"""The steps of a run that have checkpoints, in a folder or in a bucket.

On a disk, Orbax gives a step's folder its name when the save ends. A bucket has no renames: a step has its
folder from the beginning, and its last file marks it as complete.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ..addresses import is_address, open_address, path_of, reached, read_by_orbax
from ..errors import UserError
from ..metrics.loggers import CRITERIA, read_entries
from ..metrics.loggers import FILE as METRICS
from ..stores import failed
from . import manifest

LATEST = "latest"
BEST = "best"
ITEM = "model_params"
"""Name under which Tunix's CheckpointManager stores the parameters of a step."""
BEGUN = {ITEM, "optimizer_state", "_CHECKPOINT_METADATA"}
"""The entries of a step's folder before its save ends; a folder with other entries is not a step's."""


def absolute(directory: str | Path) -> str:
    """Return a local folder's absolute path, which Orbax requires; return an address unchanged."""
    return str(directory) if is_address(directory) else str(Path(directory).expanduser().resolve())


def step_folders(directory: str | Path) -> list[int]:
    """Return the steps that have a folder, whatever its content, ascending.

    In a bucket these are the steps whose save has ended; `unfinished` returns the others.

    Raises:
        UserError: when it cannot be read, or an address's bucket does not exist.
    """
    try:
        with reached(directory):
            steps = _numbered(directory)
            if read_by_orbax(directory):
                steps = _ended(directory, steps)
            return steps
    except OSError as error:  # of this machine's file systems
        raise UserError(
            f"{directory}: cannot be read: {error.strerror or error}", "allow this process to read it"
        ) from error


def unfinished(directory: str | Path) -> list[int]:
    """Return the steps in a bucket whose save is still running or was killed, ascending.

    On a disk there are none, because Orbax names a step's folder when its save ends.
    """
    if not read_by_orbax(directory):
        return []
    with reached(directory):
        return _unended(directory, _numbered(directory))


def _numbered(directory: str | Path) -> list[int]:
    """Return the folders whose names are numbers, ascending; [] if the directory does not exist."""
    root = path_of(directory)
    if not root.is_dir():
        return []
    return sorted(int(path.name) for path in root.iterdir() if path.name.isdecimal() and path.is_dir())


def _ended(directory: str | Path, steps: list[int]) -> list[int]:
    """Return the steps whose save has ended.

    Args:
        steps: the folders whose names are numbers.

    Raises:
        UserError: when the bucket does not exist.
    """
    opened = None if steps else open_address(directory)
    if isinstance(opened, tuple):
        system, path = opened
        try:
            # gcsfs reports "no folder" for a bucket that does not exist, and for one without read permission.
            system.ls(path.partition("/")[0], detail=False, max_results=1)
        except FileNotFoundError as error:
            raise failed(str(directory), "read", error) from error
    return [step for step in steps if _has_ended(directory, step)]


def _unended(directory: str | Path, steps: list[int]) -> list[int]:
    """Return the steps whose save is still running or was killed; `steps` as of `_ended`."""
    return [
        step
        for step in steps
        if not _has_ended(directory, step)
        and {path.name for path in (path_of(directory) / str(step)).iterdir()} <= BEGUN
    ]


def _has_ended(directory: str | Path, step: int) -> bool:
    return bool((path_of(directory) / str(step) / manifest.COMMITTED).exists())


def saved_steps(directory: str | Path) -> list[int]:
    """Return the steps of the complete checkpoints in a folder, ascending.

    Raises:
        UserError: when an address cannot be read, or its bucket does not exist.
    """
    root = path_of(directory)
    with reached(directory):
        return [step for step in step_folders(directory) if (root / str(step) / ITEM).is_dir()]


def choose_step(directory: str | Path, which: str) -> int:
    """Return the step that "latest", "best" or a number selects.

    Raises:
        UserError: when there is no such step.
    """
    steps = saved_steps(directory)
    if not steps:
        begun = unfinished(directory)
        raise UserError(
            f"{directory}: no checkpoint"
            + (f"; the save of step {begun[-1]} has not ended" if begun else ""),
            "--checkpoint DIR says where train.py saved them",
        )
    if which == LATEST:
        return steps[-1]
    if which == BEST:
        return _best_step(directory, steps)
    if not which.isdecimal():
        raise UserError(f"--step {which}: is neither latest, best nor a number", "--step latest")
    if int(which) not in steps:
        raise UserError(
            f"{directory}: no checkpoint of step {which}", f"there are {', '.join(map(str, steps))}"
        )
    return int(which)


def check_whole(directory: str, step: int) -> None:
    """Check that the files of a step are those that were saved; name the newest intact step before it."""
    reason = _damage(directory, step)
    if reason is None:
        return
    earlier = (s for s in reversed(step_folders(directory)) if s < step and _damage(directory, s) is None)
    whole = next(earlier, None)
    raise UserError(
        f"{directory}: the checkpoint of step {step} is damaged ({reason})",
        "no earlier one is complete"
        if whole is None
        else f"--step {whole} is the newest complete one before it",
    )


def _damage(directory: str, step: int) -> str | None:
    """Return what is wrong with a step's parameters; trees saved by other programs have no checksums."""
    tree = path_of(directory) / str(step) / ITEM
    if tree.is_dir() and not (tree / manifest.SUMS).exists():
        return None
    try:
        return manifest.damage(tree)
    except OSError as error:
        return error.strerror or str(error)


def step_losses(directory: str | Path, step: int) -> dict[str, float]:
    """Return "loss" and "eval_loss" of a step, if the run logged them."""
    out: dict[str, float] = {}
    for entry in _logged(directory):
        if entry["step"] == step:
            out |= {key: float(entry[key]) for key in ("loss", "eval_loss") if entry.get(key) is not None}
    return out


def _best_step(directory: str | Path, steps: list[int]) -> int:
    costs = {
        entry["step"]: criterion.cost(float(entry[criterion.name]))
        for entry in _logged(directory)
        for criterion in CRITERIA
        if entry.get(criterion.name) is not None and entry["step"] in steps
    }
    costs = {step: cost for step, cost in costs.items() if not math.isnan(cost)}
    if not costs:
        raise UserError(
            f"{directory}/{METRICS}: no evaluation loss or reward for any of the kept checkpoints "
            f"({', '.join(map(str, steps))})",
            "evaluate at the steps that are saved (data.eval, train.eval_every), or give --step N",
        )
    return min(costs, key=lambda step: (costs[step], step))


def _logged(directory: str | Path) -> list[dict[str, Any]]:
    """Return the entries of metrics.jsonl. Losses that are not finite are texts, which float() reads."""
    with reached(directory):
        return [entry for _, entry in read_entries(path_of(directory) / METRICS)]
