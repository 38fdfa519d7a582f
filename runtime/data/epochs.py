"""Which samples an epoch draws, and how they are packed into rows."""

from __future__ import annotations

import math
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
    """The rows of each epoch; their number is the same in all of them.

    An epoch draws weight x samples of each source: as many copies of all as the weight has whole parts,
    and a part of them, chosen anew in each epoch, for what is left of it.

    Args:
        samples: at least one; what is drawn is their groups.
        length: tokens of a row.
        packing: whether several samples share one.
        seed: with the epoch, decides which equally long samples meet in a row, and which are drawn of a
            source that is not drawn whole; None keeps the order.
        weights: of each source, all 1 when empty.
    """

    def __init__(
        self,
        samples: Samples,
        length: int,
        packing: bool,
        seed: int | None,
        weights: Sequence[float] = (),
    ) -> None:
        # Of a group its first: groups are not packed.
        self._lengths, sources = samples.lengths[:: samples.group], samples.sources[:: samples.group]
        self._length = length
        self._packing = packing
        self._seed = seed
        if all(weight == 1 for weight in weights):
            self._copies = [np.arange(len(self._lengths))]
            self._parts: list[tuple[np.ndarray, int]] = []
        else:
            own = [np.flatnonzero(sources == source) for source in range(len(weights))]
            self._copies = [
                np.tile(members, math.floor(weight)) for members, weight in zip(own, weights, strict=True)
            ]
            self._parts = [
                (members, round((weight - math.floor(weight)) * len(members)))
                for members, weight in zip(own, weights, strict=True)
            ]
        self._changes = any(count for _, count in self._parts)
        self._cached = lru_cache(maxsize=2)(self._of)

    def of(self, epoch: int) -> PackedRows:
        """The rows of an epoch. Some may be empty where packing draws other samples than in the first."""
        return self._cached(epoch if self._packing or self._changes else 0)

    @property
    def draws(self) -> int:
        """Samples that an epoch draws."""
        return sum(len(members) for members in self._copies) + sum(count for _, count in self._parts)

    def _of(self, epoch: int) -> PackedRows:
        whole = np.concatenate(self._copies)
        part = self._drawn(epoch)
        if not self._packing:
            return PackedRows(
                np.sort(np.concatenate([whole, part]), kind="stable"), np.arange(self.draws + 1)
            )
        rows = self._packed(whole, part, epoch)
        if not self._changes:
            return rows
        wanted = self._rows()
        while len(rows) > wanted and len(part):
            # Other samples, other lengths: what does not fit is left for another epoch.
            surplus = len(rows) - wanted
            part = part[: -max(1, surplus * self.draws // len(rows))]
            rows = self._packed(whole, part, epoch)
        missing = np.full(wanted - len(rows), rows.offsets[-1])
        return PackedRows(rows.samples, np.concatenate([rows.offsets, missing]))

    def _rows(self) -> int:
        """Rows of every epoch, when they draw different samples: those of the first."""
        whole = np.concatenate(self._copies)
        empty = np.zeros(0, np.int64)
        return max(len(self._packed(whole, part, 0)) for part in (empty, self._drawn(0)))

    def _packed(self, whole: np.ndarray, part: np.ndarray, epoch: int) -> PackedRows:
        order = np.concatenate([whole, part])
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        return pack(self._lengths, self._length, order)

    def _drawn(self, epoch: int) -> np.ndarray:
        """The samples of an epoch from sources that it does not draw whole, in random order."""
        random = np.random.default_rng([self._seed or 0, epoch, 1])
        drawn = [random.choice(members, count, replace=False) for members, count in self._parts if count]
        return random.permutation(np.concatenate(drawn)) if drawn else np.zeros(0, np.int64)


def tempered(sizes: Sequence[int], temperature: float) -> list[float]:
    """Weights by which an epoch draws of each source in proportion to size ** (1 / temperature).

    As many samples are drawn as there are, but for rounding, and of each source with any at least one. With a
    temperature of 1 these are weights of 1; the higher it is, the more alike the sources' parts are (as
    multilingual BERT and T5 mix languages: https://arxiv.org/abs/2010.11934, section 3.2).

    Args:
        sizes: samples of each source.
    """
    largest = max(sizes)
    shares = [(size / largest) ** (1 / temperature) if size else 0.0 for size in sizes]
    scale = sum(sizes) / sum(shares)
    draws = [max(1, round(scale * share)) if size else 0 for share, size in zip(shares, sizes, strict=True)]
    return [drawn / size if size else 0.0 for drawn, size in zip(draws, sizes, strict=True)]


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
