"""Draw the samples of an epoch by the weights of their sources, and pack them into rows.

A row is a line of at most data.max_length tokens.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from ..errors import UserError
from ..settings import DataSettings, Source
from .row_counts import SplitReport
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
    """The rows of each epoch, which draws weight x samples of each source.

    The weight's whole part gives full copies, its fraction gives a random part that each epoch chooses anew.
    Every epoch has the same number of rows.

    Args:
        samples: at least one; whole groups are drawn.
        length: tokens of a row.
        packing: whether several samples share a row.
        seed: decides, with the epoch, which equally long samples share a row, and which samples are drawn
            from a source with a fractional weight; None keeps the order.
        weights: the weight of each source.
        room: what a row holds of pictures; None for samples without.
    """

    def __init__(
        self,
        samples: Samples,
        length: int,
        packing: bool,
        seed: int | None,
        weights: Sequence[float],
        room: Room | None = None,
    ) -> None:
        # Only the first sample of each group: groups are not packed.
        self._lengths = samples.lengths[:: samples.group]
        self._length, self._packing, self._seed = length, packing, seed
        self._room = room
        self._pictures = samples.patch_counts, samples.picture_counts
        members = [np.flatnonzero(samples.group_sources == source) for source in range(len(weights))]
        self._copies = np.concatenate(
            [np.tile(groups, math.floor(weight)) for groups, weight in zip(members, weights, strict=True)]
        )
        self._parts = [
            (groups, round((weight - math.floor(weight)) * len(groups)))
            for groups, weight in zip(members, weights, strict=True)
        ]
        self._changes = any(count for _, count in self._parts)
        self._cached = lru_cache(maxsize=2)(self._of)

    @property
    def draws(self) -> int:
        """Return the number of samples that an epoch draws; a group counts once."""
        return len(self._copies) + sum(count for _, count in self._parts)

    def of(self, epoch: int) -> PackedRows:
        """Return the rows of an epoch; with packing some may be empty in epochs after the first."""
        return self._cached(epoch if self._packing or self._changes else 0)

    def _of(self, epoch: int) -> PackedRows:
        part = self._drawn(epoch)
        if not self._packing:
            order = np.sort(np.concatenate([self._copies, part]), kind="stable")
            return PackedRows(order, np.arange(self.draws + 1))
        rows = self._packed(part, epoch)
        if not self._changes:
            return rows
        most = self._rows()
        while len(rows) > most and len(part):
            # Other samples have other lengths: those that do not fit are left for another epoch.
            surplus = len(rows) - most
            part = part[: -max(1, surplus * self.draws // len(rows))]
            rows = self._packed(part, epoch)
        missing = np.full(most - len(rows), rows.offsets[-1])
        return PackedRows(rows.samples, np.concatenate([rows.offsets, missing]))

    def _packed(self, part: np.ndarray, epoch: int) -> PackedRows:
        """Pack the full copies and a drawn part of the samples."""
        order = np.concatenate([self._copies, part])
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        if self._room is None:
            return pack(self._lengths, self._length, order)
        return pack_pictures(self._lengths, *self._pictures, self._length, self._room, order)

    def _rows(self) -> int:
        """Return the number of rows of every epoch if epochs draw different samples."""
        nothing = np.zeros(0, np.int64)
        return max(len(self._packed(part, 0)) for part in (nothing, self._drawn(0)))

    def _drawn(self, epoch: int) -> np.ndarray:
        """Return an epoch's samples from sources with a fractional weight, in random order."""
        random = np.random.default_rng([self._seed or 0, epoch, 1])
        drawn = [random.choice(groups, count, replace=False) for groups, count in self._parts if count]
        return random.permutation(np.concatenate(drawn)) if drawn else np.zeros(0, np.int64)


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
            fits = room // length  # samples that fit in one such row
            needed = -(-count // fits)
            if at < len(rooms):
                there = with_room[room]
                taken = there[: -needed - 1 : -1]
                del there[-needed:]
                if not there:
                    del with_room[room], rooms[at]
            else:
                taken = list(range(rows, rows + needed))
                rows += needed
            put = min(count, len(taken) * fits)
            placed.append(np.repeat(taken, fits)[:put])
            count -= put
            full = put // fits
            _keep(with_room, rooms, room - fits * length, taken[:full])
            _keep(with_room, rooms, room - (put - full * fits) * length, taken[full:])
    row_of = np.concatenate(placed) if placed else np.zeros(0, np.int64)
    by_row = np.argsort(row_of, kind="stable")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of, minlength=rows))])
    return PackedRows(chosen[by_row], offsets)


@dataclass(frozen=True)
class Room:
    """What a row holds of pictures.

    Attributes:
        patches: the patches that it has room for.
        pictures: the most pictures, None for any number.
    """

    patches: int
    pictures: int | None = None


TRIED = 64
"""The most rows with room for a sample's tokens that are asked for room for its pictures."""


def pack_pictures(
    lengths: np.ndarray,
    patches: np.ndarray,
    pictures: np.ndarray,
    capacity: int,
    room: Room,
    order: Sequence[int] | np.ndarray,
) -> PackedRows:
    """Pack by tokens and pictures together: best-fit decreasing by tokens, as `pack`, into the fullest row
    that also has room for the sample's pictures.

    The number of rows depends only on the sizes, and `order` decides between equal samples.

    Args:
        lengths, patches, pictures: tokens, patches and pictures of each sample, at most those of a row.
        capacity: tokens of a row.
        room: what else a row holds.
        order: as for `pack`.
    """
    chosen = np.asarray(order, dtype=np.int64)
    sizes = np.stack([lengths, patches, pictures], 1).astype(np.int64)[chosen]
    by_size = np.lexsort((-sizes[:, 2], -sizes[:, 1], -sizes[:, 0]))
    chosen, sizes = chosen[by_size], sizes[by_size]
    seen = sizes[sizes[:, 2] > 0]
    least = int(seen[:, 1].min()) if len(seen) else 0
    most = sys.maxsize if room.pictures is None else room.pictures
    left: list[tuple[int, int]] = []  # patches and pictures for which each row has room
    # Rows by their free tokens: those with room for a picture, and those without.
    open_rows: list[tuple[int, int]] = []
    full_rows: list[tuple[int, int]] = []
    row_of = np.empty(len(chosen), np.int64)
    for i, (length, needed, count) in enumerate(sizes.tolist()):
        rows, at = open_rows, -1
        if not count and (first := bisect_left(full_rows, (length, -1))) < len(full_rows):
            rows, at = full_rows, first
        else:
            first = bisect_left(open_rows, (length, -1))
            for place in range(first, min(first + TRIED, len(open_rows))):
                patches_left, pictures_left = left[open_rows[place][1]]
                if patches_left >= needed and pictures_left >= count:
                    at = place
                    break
        if at < 0:
            free, row = capacity, len(left)
            left.append((room.patches, most))
        else:
            free, row = rows.pop(at)
        patches_left, pictures_left = left[row]
        left[row] = patches_left, pictures_left = patches_left - needed, pictures_left - count
        if free > length:
            fits = pictures_left > 0 and patches_left >= least
            insort(open_rows if fits else full_rows, (free - length, row))
        row_of[i] = row
    by_row = np.argsort(row_of, kind="stable")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(row_of, minlength=len(left)))])
    return PackedRows(chosen[by_row], offsets)


MORE_ROWS = 0.02
"""The share of further rows that packing by patches may need, compared with packing by tokens alone."""

COUNTED = 20_000
"""The most samples that decide how many patches a row has."""


def room_of(samples: Samples, others: Samples | None, data: DataSettings, unit: int) -> Room:
    """Return what the rows of a run hold of pictures.

    It is the fewest patches with which packing needs hardly more rows than by tokens alone. The number is
    rounded up, so that runs on similar data compile the same program.

    Args:
        samples, others: for training and for evaluation, at least one of training.
        unit: divides the patches of a row.
    """
    per_row = None if data.images is None else data.images.per_row
    largest = [int(part.patch_counts.max()) for part in (samples, others) if part is not None and len(part)]
    most = rounded(max([unit, *largest]), unit)
    if not data.packing or not samples.patch_counts.any():
        return Room(most, per_row)
    some = np.linspace(0, len(samples) - 1, min(COUNTED, len(samples))).astype(np.int64)
    sizes = samples.lengths, samples.patch_counts, samples.picture_counts

    def rows(patches: int) -> PackedRows:
        return pack_pictures(*sizes, data.max_length, Room(patches, per_row), some)

    free = rows(int(samples.patch_counts.sum()))
    patches = most
    while len(rows(patches)) > (1 + MORE_ROWS) * len(free):
        patches = rounded(patches + 1, unit)
    return Room(patches, per_row)


def rounded(patches: int, unit: int) -> int:
    """Round patches up to a multiple of an eighth of the next power of two, and of a unit."""
    step = 2 ** max(0, (patches - 1).bit_length() - 3)
    step = math.lcm(step, unit)
    return -(-patches // step) * step


def _keep(with_room: dict[int, list[int]], rooms: list[int], left: int, rows: list[int]) -> None:
    """Record rows that have this many free tokens left."""
    if left and rows:
        if left not in with_room:
            with_room[left] = []
            insort(rooms, left)
        with_room[left] += rows


def measure_rows(
    report: SplitReport, rows: Sequence[PackedRows], samples: Samples, room: Room | None = None
) -> None:
    """Record in the report how full the rows of an epoch are.

    Args:
        rows: the epoch's rows, in any number of parts.
        room: what they hold of pictures, None for data without.
    """
    report.group = samples.group
    report.rows = sum(map(len, rows)) * samples.group
    report.row_patches = 0 if room is None else room.patches
    report.patches = sum(int(samples.patch_counts[part.samples].sum()) for part in rows)
    report.row_tokens = sum(int(samples.group_lengths[part.samples].sum()) for part in rows)


def source_weights(samples: Samples, data: DataSettings) -> list[float]:
    """Return how often an epoch draws each sample, for each source of data.train.

    Args:
        samples: the training samples.
    """
    if data.temperature is None:
        return [source.weight if isinstance(source, Source) else 1.0 for source in data.train]
    sizes = np.bincount(samples.group_sources, minlength=len(data.train))
    return tempered(sizes.tolist(), data.temperature)


def tempered(sizes: Sequence[int], temperature: float) -> list[float]:
    """Return weights by which an epoch draws from each source in proportion to size ** (1 / temperature).

    The draws equal the samples in number, except for rounding; each nonempty source gives at least one. A
    temperature of 1 gives weights of 1; a higher temperature makes the sources' shares more equal (as
    multilingual BERT and T5 mix languages: https://arxiv.org/abs/2010.11934, section 3.2).

    Args:
        sizes: number of samples of each source.
    """
    largest = max(sizes)
    shares = [(size / largest) ** (1 / temperature) if size else 0.0 for size in sizes]
    scale = sum(sizes) / sum(shares)
    draws = [max(1, round(scale * share)) if size else 0 for share, size in zip(shares, sizes, strict=True)]
    return [drawn / size if size else 0.0 for drawn, size in zip(draws, sizes, strict=True)]


def check_draws(draws: int, samples: int) -> None:
    """Refuse weights by which an epoch draws none of the samples.

    Raises:
        UserError
    """
    if not draws:
        raise UserError(
            f"an epoch draws none of the {samples} samples of data.train",
            "weights are shares of a source's samples: raise data.train[].weight",
        )


def undrawn(
    sources: Sequence[str | Source],
    weights: Sequence[float],
    samples: Samples,
    drawn: np.ndarray,
    steps: tuple[int, int] = (0, 0),
) -> list[str]:
    """Return a sentence for each source of which the run draws no sample.

    Args:
        drawn: the groups of samples that are drawn in the run, or in its first epoch.
        steps: the steps of the run, and those of an epoch.
    """
    sizes = np.bincount(samples.group_sources, minlength=len(sources)).tolist()
    seen = np.bincount(samples.group_sources[drawn], minlength=len(sources))
    out = []
    for number, (source, size, weight) in enumerate(zip(sources, sizes, weights, strict=True)):
        if seen[number]:
            continue
        name = f"data.train[{number}], {source if isinstance(source, str) else source.path},"
        if not size:
            out.append(f"{name} has no usable sample, so the run does not train on it")
        elif not round(weight * size):
            share = f"{weight:g} of its {size:,} samples is {weight * size:g}, which rounds to none"
            out.append(f"{name} is never drawn: {share}; raise its weight")
        else:
            out.append(
                f"{name} is never drawn: none of its {size:,} samples is in the run's {steps[0]:,} steps, of "
                f"{steps[1]:,} an epoch"
            )
    return out


def hardly_drawn(sources: Sequence[str | Source], weights: Sequence[float], samples: float) -> list[str]:
    """Return a sentence for each source of a stream of which the run draws less than a sample on average.

    Args:
        samples: those of the run, estimated.
    """
    shares = [weight / sum(weights) for weight in weights]
    return [
        f"data.train[{number}], {source if isinstance(source, str) else source.path}, is hardly drawn: its "
        f"weight gives it {share * samples:.2g} of the about {samples:,.0f} samples of the run; raise its "
        "weight"
        for number, (source, share) in enumerate(zip(sources, shares, strict=True))
        if share * samples < 1
    ]
