"""A run of one process, which has no other process to agree with."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
"""The variables that tell a process which one of several it is."""


class SingleProcess:
    """The run of a single process.

    Attributes:
        number, count, first: as in `ProcessGroup`.
        stopped_by: the signal that it stops for.
    """

    number, count, first = 0, 1, True

    def __init__(self) -> None:
        self.stopped_by: int | None = None

    def may_begin(self, step: int, requested: int | None) -> bool:
        """See `ProcessGroup`."""
        self.stopped_by = requested
        return requested is None

    def agree(self, name: str, value: Callable[[], Any]) -> Any:
        """Return the value."""
        return value()

    def same(self, name: str, value: Any, what: str, help: str) -> None:
        """Do nothing: there is no other process."""

    def same_inputs(self, lock: Path, data: str, steps: int | None) -> None:
        """Do nothing."""

    def barrier(self, name: str) -> None:
        """Do nothing."""

    def keep_log(self, folder: Path) -> None:
        """Do nothing: a single process writes to its terminal."""

    def log(self, text: str) -> None:
        """Do nothing."""


SINGLE = SingleProcess()


def alone(hosts: int) -> bool:
    """Return whether neither the recipe nor a variable says that a run has several processes.

    Args:
        hosts: machines that the recipe's mesh spans.
    """
    in_group = any(os.environ.get(name) for name in (ADDRESS, COUNT, NUMBER))
    return hosts == 1 and (not in_group or os.environ.get(COUNT) == "1")
