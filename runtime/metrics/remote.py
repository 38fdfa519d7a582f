"""A run's metrics beside checkpoints that are not on this machine: written here, and copied there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from ..addresses import path_of, reached, write_whole
from ..errors import UserError
from .loggers import read_entries


def copy(path: Path, directory: str) -> None:
    """Puts a file, if there is one, into a directory at an address; says so where that cannot be done.

    The run has done its work by then, and the file is on this machine: that is no reason to fail.
    """
    try:
        _put(path, directory)
    except (UserError, OSError) as error:
        print(f"note: {error}; {path} has all of it", file=sys.stderr)


def publisher(directory: str) -> Callable[[Path], None]:
    """What copies a file to a directory at an address while the run goes on.

    It is for who watches, and for a machine that is lost: a copy that fails is left to the next one.
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
    """Brings the metrics of a run that another machine began, where they are more than what is here.

    Args:
        path: of metrics.jsonl, or another file of steps, on this machine.
        directory: of the checkpoints, an address.

    Raises:
        UserError: when they cannot be read; those of this machine would take their place.
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
