"""The metrics of the processes of a run that write none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


class Nowhere:
    """The metrics of a process that writes none, because process 0 writes them.

    Attributes:
        path: process 0's path of metrics.jsonl.
        early: as in `Metrics`.
    """

    early: str | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, mode: str, step: int, values: Mapping[str, float | None]) -> None:
        """Do nothing."""

    def samples(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""
