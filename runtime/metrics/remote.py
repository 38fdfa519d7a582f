"""Copy a run's metrics from this machine to checkpoints at an address."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ..addresses import path_of, reached, write_whole
from ..errors import UserError
from .loggers import read_entries


def copy(path: Path, directory: str) -> None:
    """Copy a file, if it exists, into a directory at an address; print a note if that fails.

    By then the run is complete and the file is on this machine, so a failed copy is not a failure.
    """
    try:
        _put(path, directory)
    except (UserError, OSError) as error:
        print(f"note: {error}; {path} is complete", file=sys.stderr)


def publisher(directory: str) -> Callable[[Path], None]:
    """Return a function that copies a file to a directory at an address during the run.

    The copy is for watching, and in case the machine is lost. The next copy makes up for a failed one.
    """

    def publish(path: Path) -> None:
        try:
            _put(path, directory)
        except (UserError, OSError):
            return

    return publish


def _put(path: Path, directory: str) -> None:
    if path.exists():
        write_whole(directory, path.name, path.read_bytes())


def fetch(path: Path, directory: str) -> None:
    """Fetch the metrics of a run that another machine began, if they go further than the local ones.

    Args:
        path: local path of metrics.jsonl, or another file of steps.
        directory: address of the checkpoint directory.

    Raises:
        UserError: when they cannot be read: the local ones would overwrite them.
    """
    there = path_of(directory) / path.name
    with reached(directory):
        if not there.exists():
            return
        found = there.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(found)
    if _last_step(temporary) > _last_step(path):
        temporary.replace(path)
    else:
        temporary.unlink()


def _last_step(path: Path) -> int:
    return max((entry["step"] for _, entry in read_entries(path)), default=-1)
