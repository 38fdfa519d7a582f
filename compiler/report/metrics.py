"""Read metrics.jsonl, also as left by a run that was killed, resumed or failed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from recipec.compiler.json_value import json_value

MOST = 2000
"""Most points of a curve."""

NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""How the runtime writes values that JSON has no number for."""


@dataclass
class Series:
    """A metric by optimizer step, in ascending order; values may be NaN or infinite."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.steps)

    @cached_property
    def finite(self) -> list[tuple[int, float]]:
        """(step, value) pairs whose value is finite."""
        return [pair for pair in zip(self.steps, self.values, strict=True) if math.isfinite(pair[1])]

    @cached_property
    def lost(self) -> list[tuple[int, float]]:
        """(step, value) pairs whose value is not finite."""
        return [pair for pair in zip(self.steps, self.values, strict=True) if not math.isfinite(pair[1])]

    @property
    def gaps(self) -> list[int]:
        """The first step of each stretch of values that are not finite."""
        lost = {step for step, _ in self.lost}
        return [step for before, step in pairwise([-1, *self.steps]) if step in lost and before not in lost]


@dataclass
class Metrics:
    """What a run logged, read piece by piece.

    Training and evaluation of one step have separate lines. If several lines have the same step and metric,
    the last one counts.

    Attributes:
        values: by name and step, in the order of the lines.
        lines: number of lines read.
        unreadable: lines that are not a JSON object with a step.
        rest: a last line without its line break, because the run was killed or is still writing.
        twice: steps that were logged more than once; the last counts.
        last_step: the newest step that was logged, 0 if there is none.
    """

    values: dict[str, dict[int, float]] = field(default_factory=dict)
    lines: int = 0
    unreadable: int = 0
    rest: bytes = b""
    twice: set[int] = field(default_factory=set)
    last_step: int = 0

    def take(self, content: bytes) -> Iterator[dict[str, float]]:
        """Add the next piece of the file; yield the numbers of each of its lines."""
        *lines, self.rest = (self.rest + content).split(b"\n")
        for line in lines:
            entry = json_value(line)
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is not int or not 0 <= step < 1 << 53:
                self.unreadable += bool(line.strip())
                continue
            self.lines += 1
            numbers = {name: _number(value) for name, value in entry.items()}
            known_numbers = {
                name: value for name, value in numbers.items() if value is not None and name != "step"
            }
            for name, value in known_numbers.items():
                values = self.values.setdefault(name, {})
                if step in values:
                    self.twice.add(step)
                values[step] = value
            self.last_step = max(self.last_step, step if known_numbers else 0)
            yield {"step": step, **known_numbers}

    @cached_property
    def series(self) -> dict[str, Series]:
        """The metrics by name. Use it after all lines are read."""
        pairs = {name: sorted(values.items()) for name, values in self.values.items()}
        return {
            name: Series([step for step, _ in of], [value for _, value in of]) for name, of in pairs.items()
        }

    def get(self, name: str) -> Series:
        return self.series.get(name, Series())


def _number(value: Any) -> float | None:
    """Return a line's value as a number; None if it is not one."""
    if isinstance(value, str):
        return NOT_FINITE.get(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def thin(values: Sequence[float], most: int = MOST) -> list[int]:
    """Return the indices of the points to draw, ascending.

    It divides the points into stretches of equal length and keeps the first, lowest, highest and last point
    of each, so that the line covers the same pixels. No value may be NaN or infinite.
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


def centered_mean(values: Sequence[float], window: int) -> list[float]:
    """Return the mean of each value and its neighbors: `window` values (odd), fewer and still centered at the
    ends. A mean of what lies before would be above a falling curve."""
    sums = [0.0, *accumulate(values)]
    out = []
    for index in range(len(values)):
        half = min(window // 2, index, len(values) - 1 - index)
        out.append((sums[index + half + 1] - sums[index - half]) / (2 * half + 1))
    return out


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of `count` indices, evenly spaced, including the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(index * (count - 1) / (most - 1)) for index in range(most)})
