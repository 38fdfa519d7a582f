"""Samples to rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np


class PackedRows(Sequence[tuple[int, ...]]):
    """Samples by row, as two flat arrays: row i is samples[offsets[i]:offsets[i + 1]].

    Args:
        samples: indices of samples, row after row.
        offsets: int64[rows + 1].
    """

    def __init__(self, samples: np.ndarray, offsets: np.ndarray) -> None:
        self.samples, self.offsets = samples, offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return tuple(self.samples[self.offsets[index] : self.offsets[index + 1]].tolist())


def pack(lengths: Sequence[int] | np.ndarray, capacity: int, order: Sequence[int] | np.ndarray) -> PackedRows:
    """Best-fit decreasing: from the longest sample to the shortest, each into the fullest row with room.

    How many rows come out depends on the lengths alone, so each epoch has as many steps as the next;
    `order` decides which of the samples of one length goes where. Samples of one length are placed
    together: all that fit go into the rows with the least room that is enough, so that the time is that
    of the different lengths and rooms, not that of the samples.

    Args:
        lengths: tokens of each sample, 1 to `capacity`.
        capacity: tokens of a row.
        order: samples' indices, in the order in which equally long ones are placed. One that is in it
            twice is placed twice.

    Returns:
        The rows, with each entry of `order` once.
    """
    chosen = np.asarray(order, dtype=np.int64)
    sizes = np.asarray(lengths, dtype=np.int64)[chosen]
    by_size = np.argsort(-sizes, kind="stable")
    chosen, sizes = chosen[by_size], sizes[by_size]
    starts = np.flatnonzero(np.diff(sizes, prepend=-1))
    counts = np.diff(np.append(starts, len(sizes)))

    with_room: dict[int, list[int]] = {}  # free tokens -> rows with just so many, the newest last
    rooms: list[int] = []  # the keys of with_room, ascending
    placed: list[np.ndarray] = []  # the row of each sample, in the order of `chosen`
    rows = 0
    for length, count in zip(sizes[starts].tolist(), counts.tolist(), strict=True):
        while count:
            at = bisect_left(rooms, length)
            # A row that was just given a sample has the least room, so it takes all that it can hold.
            room = rooms[at] if at < len(rooms) else capacity
            each = room // length
            needed = -(-count // each)
            if at < len(rooms):
                there = with_room[room]
                taken = there[: -needed - 1 : -1]
                del there[-needed:]
                if not there:
                    del with_room[room], rooms[at]
            else:
                taken = list(range(rows, rows + needed))
                rows += needed
            given = min(count, len(taken) * each)
            placed.append(np.repeat(taken, each)[:given])
            count -= given
            full = given // each
            _keep(with_room, rooms, room - each * length, taken[:full])
            _keep(with_room, rooms, room - (given - full * each) * length, taken[full:])
    row_of = np.concatenate(placed) if placed else np.zeros(0, np.int64)
    by_row = np.argsort(row_of, kind="stable")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of, minlength=rows))])
    return PackedRows(chosen[by_row], offsets)


def _keep(with_room: dict[int, list[int]], rooms: list[int], left: int, rows: list[int]) -> None:
    """Notes rows that have so many free tokens left."""
    if left and rows:
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left] += rows
