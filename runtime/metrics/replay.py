"""Shared parts of the loggers of other services: the run's name in the service, kept next to the checkpoints,
and lines of an earlier process."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import first_line
from .loggers import EVAL

if TYPE_CHECKING:
    from .services import Service

WHOLE = "metrics.jsonl has all values"
Entry = Mapping[str, Any]
"""A line of metrics.jsonl."""


def mode_of(entry: Entry) -> str:
    """Return "train" or "eval"."""
    return "eval" if "eval_loss" in entry else "train"


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


def replay(service: Service, entry: Entry) -> None:
    """Log a line that an earlier process wrote."""
    values = {
        name.removeprefix("eval_").removeprefix(EVAL): float(value) if isinstance(value, str) else value
        for name, value in entry.items()
        if name != "step"
    }
    service.log(mode_of(entry), entry["step"], values)


def kept(directory: str | Path, file: str) -> dict[str, Any]:
    """Return the content of a file next to the checkpoints, or nothing if it cannot be read."""
    from etils import epath

    try:
        found = json.loads((epath.Path(directory) / file).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def keep(directory: str | Path, file: str, values: Mapping[str, Any]) -> None:
    """Write such a file."""
    from etils import epath

    epath.Path(directory).mkdir(parents=True, exist_ok=True)
    (epath.Path(directory) / file).write_text(json.dumps(values, indent=2) + "\n")
