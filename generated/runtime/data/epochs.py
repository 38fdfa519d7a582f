"""Which samples an epoch draws, and the rows that they lie in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from .packing import PackedRows, pack
from .samples import Samples


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
