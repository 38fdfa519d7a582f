"""Draw the samples of an epoch, and pack them into rows."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .samples import Samples


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


class Epochs:
    """The rows of each epoch: all samples, in an own order; every epoch has the same number of rows.

    Args:
        samples: at least one; whole groups are drawn.
        length: tokens of a row.
        packing: whether several samples share a row.
        seed: decides, with the epoch, which equally long samples share a row; None keeps the order.
    """

    def __init__(self, samples: Samples, length: int, packing: bool, seed: int | None) -> None:
        # Only the first sample of each group: groups are not packed.
        self._lengths = samples.lengths[:: samples.group]
        self._length = length
        self._packing = packing
        self._seed = seed
        self._cached = lru_cache(maxsize=2)(self._of)

    def of(self, epoch: int) -> PackedRows:
        """Return the rows of an epoch."""
        return self._cached(epoch if self._packing else 0)

    def _of(self, epoch: int) -> PackedRows:
        every = np.arange(len(self._lengths))
        return self._packed(every, epoch) if self._packing else PackedRows(every, np.arange(len(every) + 1))

    def _packed(self, order: np.ndarray, epoch: int) -> PackedRows:
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        return pack(self._lengths, self._length, order)


def pack(lengths: Sequence[int] | np.ndarray, capacity: int, order: Sequence[int] | np.ndarray) -> PackedRows:
    """Pack by best-fit decreasing: from the longest sample to the shortest, into the fullest row with room.

    The number of rows depends only on the lengths, so all epochs have the same number of steps. `order`
    decides which of several equally long samples goes where. Samples of one length are placed together, into
    the rows with the least sufficient room. So the time depends on the number of different lengths and rooms,
    not on the number of samples.

    Args:
        lengths: tokens of each sample, 1 to `capacity`.
        capacity: tokens of a row.
        order: samples' indices, in the order in which equally long ones are placed. An index that occurs
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

    with_room: dict[int, list[int]] = {}  # free tokens -> rows with exactly that room, the newest last
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
    """Record rows that have this many free tokens left."""
    if left and rows:
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left] += rows
