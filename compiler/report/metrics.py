"""metrics.jsonl, read for a report: whatever a run that was killed, resumed or went wrong has left in it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from compiler.json_value import json_value

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How the runtime writes what JSON has no number for."""


@dataclass
class Series:
    """A metric by optimizer step, ascending; values may be NaN or infinite."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def finite(self) -> list[tuple[int, float]]:
        """(step, value) where the value is a number."""
        return [pair for pair in zip(self.steps, self.values, strict=True) if math.isfinite(pair[1])]

    @cached_property
    def lost(self) -> list[tuple[int, float]]:
        """(step, value) where it is none."""
        return [pair for pair in zip(self.steps, self.values, strict=True) if not math.isfinite(pair[1])]


@dataclass
class Metrics:
    """What a run logged.

    Attributes:
        series: by name.
        lines: that were read.
        unreadable: lines that are no JSON object with a step, but for a last one that was cut off.
        cut: whether the last line was cut off, as of a run that was killed, or is writing.
        repeated: steps that were logged more than once; the last counts.
    """

    series: dict[str, Series] = field(default_factory=dict)
    lines: int = 0
    unreadable: int = 0
    cut: bool = False
    repeated: int = 0

    def get(self, name: str) -> Series:
        return self.series.get(name, Series())

    @property
    def last_step(self) -> int:
        """The newest that was logged, 0 without any."""
        return max((series.steps[-1] for series in self.series.values() if len(series)), default=0)


def parse(text: str) -> Metrics:
    """The metrics in a file's text.

    Training and evaluation of one step are lines of their own; what a later line says of a step and metric
    holds.
    """
    found: dict[str, dict[int, float]] = {}
    out = Metrics()
    lines = text.split("\n")
    twice: set[int] = set()
    for place, line in enumerate(lines, 1):
        if not line.strip():
            continue
        entry = _entry(line)
        if entry is None:
            if place == len(lines):
                out.cut = True
            else:
                out.unreadable += 1
            continue
        out.lines += 1
        step = entry["step"]
        for name, value in entry.items():
            number = _number(value)
            if name == "step" or number is None:
                continue
            values = found.setdefault(name, {})
            if step in values:
                twice.add(step)
            values[step] = number
    out.repeated = len(twice)
    out.series = {name: _series(values.items()) for name, values in found.items()}
    return out


def _entry(line: str) -> dict[str, Any] | None:
    entry = json_value(line)
    if not isinstance(entry, dict):
        return None
    step = entry.get("step")
    return entry if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 1 << 53 else None


def _number(value: Any) -> float | None:
    """A value of a line; None where it is no number."""
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _series(values: Iterable[tuple[int, float]]) -> Series:
    pairs = sorted(values)
    return Series([step for step, _ in pairs], [value for _, value in pairs])
