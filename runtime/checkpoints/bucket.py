"""The steps of a run whose checkpoints are in a bucket.

A bucket has no renames: a step has its folder from the beginning, and its last file marks it as complete.
"""

from __future__ import annotations

from pathlib import Path

from ..addresses import open_address, path_of
from ..stores import failed
from .manifest import COMMITTED

BEGUN = {"model_params", "optimizer_state", "_CHECKPOINT_METADATA"}
"""The entries of a step's folder before its save ends; a folder with other entries is not a step's."""


def ended(directory: str | Path, steps: list[int]) -> list[int]:
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


def unfinished(directory: str | Path, steps: list[int]) -> list[int]:
    """Return the steps whose save is still running or was killed; `steps` as of `ended`."""
    return [
        step
        for step in steps
        if not _has_ended(directory, step)
        and {path.name for path in (path_of(directory) / str(step)).iterdir()} <= BEGUN
    ]


def _has_ended(directory: str | Path, step: int) -> bool:
    return bool((path_of(directory) / str(step) / COMMITTED).exists())
