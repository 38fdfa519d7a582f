"""Tests of packing: every sample once, within the capacity, in a number of rows that no order changes."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from recipec.runtime.data.epochs import pack


@pytest.mark.parametrize("seed", range(40))
def test_packing_holds_each_sample_once_and_makes_no_row_too_long(seed: int) -> None:
    draw = random.Random(seed)
    capacity = draw.randint(1, 200)
    lengths = [draw.randint(1, capacity) for _ in range(draw.randint(1, 300))]
    order = list(range(len(lengths)))
    draw.shuffle(order)
    rows = pack(lengths, capacity, order)
    assert sorted(i for row in rows for i in row) == sorted(order)
    assert all(0 < sum(lengths[i] for i in row) <= capacity for row in rows)
    assert len(rows) == len(pack(lengths, capacity, range(len(lengths))))
    # No two rows fit into one, so that at most one row is half empty.
    used = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(used) < 2 or used[0] + used[1] > capacity


def test_packing_takes_the_fullest_row_that_has_room() -> None:
    assert list(pack([3, 7, 5, 5, 2], 10, range(5))) == [(1, 0), (2, 3), (4,)]
    assert list(pack([3, 7, 5, 5, 2], 10, [4, 3, 2, 1, 0])) == [(1, 0), (3, 2), (4,)]
    # Packing uses the fullest row with room, not the first.
    assert list(pack([6, 8, 2], 10, range(3))) == [(1, 2), (0,)]


def test_a_million_samples_are_packed_in_seconds() -> None:
    draw = np.random.default_rng(0)
    lengths = np.clip(draw.lognormal(6.7, 0.5, 1_000_000), 1, 3072).astype(np.int64)
    start = time.process_time()
    rows = pack(lengths, 3072, draw.permutation(len(lengths)))
    assert time.process_time() - start < 10
    assert np.array_equal(np.sort(rows.samples), np.arange(len(lengths)))
    filled = np.add.reduceat(lengths[rows.samples], rows.offsets[:-1])
    assert filled.max() <= 3072 and filled.mean() > 0.99 * 3072
