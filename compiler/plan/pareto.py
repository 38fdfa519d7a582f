"""Which configurations nothing else beats."""

from __future__ import annotations

from collections.abc import Sequence

Objectives = tuple[float, ...]
"""What is to be small: seconds a token, bytes of HBM, US$ a token."""


def dominates(a: Objectives, b: Objectives) -> bool:
    """Whether `a` is nowhere worse than `b`, and somewhere better."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and a != b


def front(points: Sequence[Objectives]) -> list[int]:
    """Indices of the points that no other dominates, by their first objective, then the next."""
    best = [i for i, point in enumerate(points) if not any(dominates(other, point) for other in points)]
    return sorted(best, key=lambda i: points[i])
