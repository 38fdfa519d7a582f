"""A run's metrics beside checkpoints that are not on this machine: written here, and copied there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from runtime.metrics import read_entries


def copy(path: Path, directory: str) -> None:
    """Puts a file, if there is one, into a directory at an address."""
    from etils import epath

    if path.exists():
        (epath.Path(directory) / path.name).write_bytes(path.read_bytes())


def publisher(directory: str) -> Callable[[Path], None]:
    """What copies a file to a directory at an address while the run goes on.

    It is for who watches, and for a machine that is lost: a copy that fails is left to the next one.
    """

    def publish(path: Path) -> None:
        try:
            copy(path, directory)
        except Exception:  # of whatever library the address belongs to
            return

    return publish


def nowhere(path: Path) -> None:
    """The publisher of a run whose checkpoints are on this machine."""


def fetch(path: Path, directory: str) -> None:
    """Brings the metrics of a run that another machine began, where they are more than what is here.

    Args:
        path: of metrics.jsonl on this machine.
        directory: of the checkpoints, an address.
    """
    from etils import epath

    there = epath.Path(directory) / path.name
    if not there.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(there.read_bytes())
    if _last_step(temporary) > _last_step(path):
        temporary.replace(path)
    else:
        temporary.unlink()


def _last_step(path: Path) -> int:
    return max((entry["step"] for _, entry in read_entries(path)), default=-1)
