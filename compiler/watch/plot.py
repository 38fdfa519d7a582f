"""A curve drawn with characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Braille's dots by column and row."""
BRAILLE = 0x2800
EVAL, EVAL_ASCII = "◆", "o"


@dataclass(frozen=True)
class Plot:
    """Lines of text.

    Attributes:
        rows: from the top, each of the same length.
        low, high: the values of the lowest and of the highest row.
        merged: steps that share a column, on average.
    """

    rows: list[str]
    low: float
    high: float
    merged: float


def plot(
    steps: Sequence[int],
    values: Sequence[float],
    marks: Sequence[tuple[int, float]],
    width: int,
    height: int,
    unicode: bool,
) -> Plot | None:
    """Draws values by step, as the means of the steps that share a column, joined by lines.

    Args:
        steps: ascending.
        values: NaN where there is none.
        marks: evaluations, each drawn by itself.
        width, height: in characters, at least 1.
        unicode: whether the terminal has more than ASCII.

    Returns:
        None when there is nothing to draw.
    """
    columns, rows = (2 * width, 4 * height) if unicode else (width, height)
    every = [*steps, *(step for step, _ in marks)]
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
    shown = [(step, value) for step, value in marks if math.isfinite(value)]
    if not finite and not shown:
        return None
    first, last = min(every), max(every)
    means = _means(finite, first, last, columns)
    heights = [*means.values(), *(value for _, value in shown)]
    low, high = min(heights), max(heights)

    def column(step: int, count: int) -> int:
        return 0 if last == first else min(count - 1, (step - first) * count // (last - first + 1))

    def row(value: float, count: int) -> int:
        share = 0.5 if high == low else (value - low) / (high - low)
        return min(count - 1, int((1 - share) * count))

    canvas = [[0] * width for _ in range(height)]
    for x, value in means.items():
        y = row(value, rows)
        if unicode:
            canvas[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
        else:
            canvas[y][x] = 1
    text = [[(chr(BRAILLE + cell) if unicode else "*") if cell else " " for cell in line] for line in canvas]
    for step, value in shown:
        text[row(value, height)][column(step, width)] = EVAL if unicode else EVAL_ASCII
    merged = max(1.0, len(steps) / columns)
    return Plot(["".join(line) for line in text], low, high, merged)


def _means(points: Sequence[tuple[int, float]], first: int, last: int, columns: int) -> dict[int, float]:
    """The mean of each column that has any points, and what lies between for the others."""
    sums: dict[int, tuple[float, int]] = {}
    span = last - first + 1
    for step, value in points:
        x = 0 if span == 1 else min(columns - 1, (step - first) * columns // span)
        total, count = sums.get(x, (0.0, 0))
        sums[x] = (total + value, count + 1)
    means = {x: total / count for x, (total, count) in sorted(sums.items())}
    for (x, value), (other, end) in itertools.pairwise(list(means.items())):
        for between in range(x + 1, other):
            means[between] = value + (end - value) * (between - x) / (other - x)
    return means
