"""Tests of a search's Pareto front, and of the time on the links between chips."""

from __future__ import annotations

import itertools
import random

import pytest

from recipec.compiler.plan import search
from recipec.compiler.plan.results import Collective
from recipec.compiler.plan.search import received


@pytest.mark.parametrize("seed", range(20))
def test_pareto_front_matches_brute_force(seed: int) -> None:
    source = random.Random(seed)
    points = [tuple(float(source.randrange(6)) for _ in range(3)) for _ in range(40)]
    expected = set()
    for i, a in enumerate(points):
        worse = any(
            all(b[k] <= a[k] for k in range(3)) and any(b[k] < a[k] for k in range(3)) for b in points
        )
        if not worse:
            expected.add(i)
    found = search.front(points)
    assert set(found) == expected
    assert [points[i] for i in found] == sorted(points[i] for i in found)


def test_point_dominates_only_if_better_somewhere_and_worse_nowhere() -> None:
    assert search.dominates((1, 2, 3), (1, 2, 4))
    assert not search.dominates((1, 2, 3), (1, 2, 3))
    assert not any(search.dominates(a, b) for a, b in itertools.permutations([(1.0, 2.0), (2.0, 1.0)]))


@pytest.mark.parametrize(
    "kind, axes, expected",
    [
        ("all-gather", ("fsdp",), 75.0),
        ("all-reduce", ("fsdp",), 150.0),
        ("reduce-scatter", ("fsdp",), 300.0),
        ("all-to-all", ("tp",), 50.0),
        ("collective-permute", ("tp",), 100.0),
        ("all-gather", (), 87.5),
    ],
)
def test_received_bytes_depend_on_collective_kind_and_axes(
    kind: str, axes: tuple[str, ...], expected: float
) -> None:
    """Receive bytes on 4 x 2 devices, where each device ends with 100 bytes."""
    assert received(Collective(kind, axes, False, 1, 100.0), {"fsdp": 4, "tp": 2}) == expected
