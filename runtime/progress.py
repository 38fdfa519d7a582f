"""Show on one line of stderr how far a long job is and how long it will still take."""

from __future__ import annotations

import os
import shutil
import sys
import time
from types import TracebackType
from typing import TextIO

QUIET_SECONDS = 2.0
"""A job that ends within this time prints nothing."""

silent = False
"""Whether progress lines are off; set by programs that are asked to be quiet."""

FORESEEABLE = 0.05
"""The share of the work after which its pace predicts the remaining time."""


class Progress:
    """Count work done: redraw one line on a terminal; elsewhere print a line now and then.

    Args:
        label: the name of the job, e.g. "merging".
        total: total work in any unit; None if unknown, and then the work done is shown.
        unit: unit of the work if the total is unknown; "B" (bytes) also shows the pace.
        interval: seconds between lines if stderr is no terminal.
        foreseen: whether the pace so far predicts the remaining time; if not, the time so far is shown.
    """

    def __init__(
        self,
        label: str,
        total: float | None,
        stream: TextIO | None = None,
        interval: float = 15.0,
        unit: str = "",
        foreseen: bool = True,
    ) -> None:
        self.label = label
        self.unit = unit
        self.foreseen = foreseen
        self.total = total
        self.done = 0.0
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.interval = 0.2 if self.terminal else interval
        self.started = time.monotonic()
        self.next = self.started + QUIET_SECONDS
        self.shown = False
        self.drawn = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown and self.terminal:
            print(file=self.stream)

    def skip(self, amount: float) -> None:
        """Subtract work that need not be done."""
        if self.total is not None:
            self.total -= amount

    def advance(self, amount: float) -> None:
        """Add to the work done."""
        self.done += amount
        now = time.monotonic()
        if silent or now < self.next or self.total == 0:
            return
        if not self.shown and self.total is not None and self.done >= self.total:
            return  # the last piece was most of the work: nothing is left to wait for
        self.next = now + self.interval
        self.shown = True
        line = f"{self.label}: {self._state(now)}"
        print(
            self._redrawn(line) if self.terminal else line,
            end="" if self.terminal else "\n",
            file=self.stream,
        )
        self.stream.flush()

    def _redrawn(self, line: str) -> str:
        """Redraw the line within the terminal's width, because a wrapped line cannot be redrawn."""
        line = line[: max(shutil.get_terminal_size().columns - 1, 20)]
        before, self.drawn = self.drawn, len(line)
        return f"\r{line:<{before}}"

    def _state(self, now: float) -> str:
        if self.total is None:
            return f"{self.done:,.0f} {self.unit}"
        share = min(self.done / self.total, 1.0)
        if not self.foreseen:
            return f"{share:4.0%}, {duration(now - self.started)} so far"
        if share < FORESEEABLE:
            return f"{share:4.0%}"
        pace = f", {self.done / (now - self.started) / 1e9:.2f} GB/s" if self.unit == "B" else ""
        return f"{share:4.0%}{pace}, {duration((now - self.started) * (1 - share) / share)} left"


def duration(seconds: float) -> str:
    """Format a duration as "42 s", "3 min 05 s" or "2 h 10 min"."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def readable_size(size: int, space: str = "") -> str:
    """Format bytes as "62.5GB" or "4.1MB"; `space` comes before the unit."""
    return f"{size / 1e9:.1f}{space}GB" if size >= 10**9 else f"{size / 1e6:.1f}{space}MB"
