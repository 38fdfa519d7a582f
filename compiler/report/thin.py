"""Fewer points that draw the same line: no peak is lost, and the page says what was left out."""

from __future__ import annotations

from collections.abc import Sequence

MOST = 2000
"""Points of a curve, at most."""


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
