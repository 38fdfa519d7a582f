"""metrics.jsonl: whatever a run that was killed, resumed or went wrong has left in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from recipec.compiler.json_value import json_value

MOST = 2000
"""Points of a curve, at most."""

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
    """What a run logged, line by line.

    Training and evaluation of one step are lines of their own; what a later line says of a step and metric
    holds.

    Attributes:
        values: by name and step, in the order of the lines.
        lines: that were read.
        unreadable: lines that are no JSON object with a step, but for a last one that was cut off.
        cut: whether the last line was cut off, as of a run that was killed, or is writing.
        twice: steps that were logged more than once; the last counts.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    lines: int = 0
    unreadable: int = 0
    cut: bool = False
    twice: set[int] = field(default_factory=set)

    def take(self, line: str | bytes) -> dict[str, float] | None:
        """Adds a line; its numbers, or None for what is no line of metrics.jsonl."""
        entry = json_value(line)
        step = entry.get("step") if isinstance(entry, dict) else None
        if type(step) is not int or not 0 <= step < 1 << 53:
            self.unreadable += bool(line.strip())
            return None
        self.lines += 1
        numbers = {name: _number(value) for name, value in entry.items()}
        found = {name: value for name, value in numbers.items() if value is not None and name != "step"}
        for name, value in found.items():
            values = self.values.setdefault(name, {})
            if step in values:
                self.twice.add(step)
            values[step] = value
        return {"step": step, **found}

    @cached_property
    def series(self) -> dict[str, Series]:
        """By name, once all lines are read."""
        pairs = {name: sorted(values.items()) for name, values in self.values.items()}
        return {
            name: Series([step for step, _ in of], [value for _, value in of]) for name, of in pairs.items()
        }

    def get(self, name: str) -> Series:
        return self.series.get(name, Series())

    @property
    def last_step(self) -> int:
        """The newest that was logged, 0 without any."""
        return max((max(values) for values in self.values.values()), default=0)


def parse(text: str) -> Metrics:
    """The metrics in a file's text."""
    out = Metrics()
    *lines, last = text.split("\n")
    for line in lines:
        out.take(line)
    if last.strip() and out.take(last) is None:
        out.unreadable, out.cut = out.unreadable - 1, True
    return out


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


def thin(values: Sequence[float], most: int = MOST) -> list[int]:
    """Indices of the points to draw, ascending.

    Of each of equal stretches the first, lowest, highest and last point is kept, so that the line covers the
    same pixels; values that are not numbers are left to the caller, and none may be among these.
    """
    if len(values) <= most:
        return list(range(len(values)))
    stretches = max(1, most // 4)
    kept: set[int] = set()
    for number in range(stretches):
        start = number * len(values) // stretches
        stop = (number + 1) * len(values) // stretches
        part = range(start, stop)
        kept |= {start, stop - 1, min(part, key=values.__getitem__), max(part, key=values.__getitem__)}
    return sorted(kept)


def trailing_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it, `window` in all, fewer at the beginning."""
    out, total = [], 0.0
    for index, value in enumerate(values):
        total += value
        if index >= window:
            total -= values[index - window]
        out.append(total / min(index + 1, window))
    return out


def spread(count: int, most: int) -> list[int]:
    """At most so many of `count` indices, evenly apart, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})
