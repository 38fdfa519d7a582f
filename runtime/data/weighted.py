"""Draw the samples of an epoch by the weights of their sources."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..errors import UserError
from ..settings import Source
from .epochs import Epochs, PackedRows
from .samples import Samples


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
    owners = samples.sources[:: samples.group]
    sizes = np.bincount(owners, minlength=len(sources)).tolist()
    seen = np.bincount(owners[drawn], minlength=len(sources))
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


class WeightedEpochs(Epochs):
    """The rows of each epoch, which draws weight x samples of each source.

    The weight's whole part gives full copies, its fraction gives a random part that each epoch chooses anew.

    Args:
        samples, length, packing: as for `Epochs`.
        seed: decides also which samples are drawn from a source with a fractional weight.
        weights: the weight of each source.
    """

    def __init__(
        self, samples: Samples, length: int, packing: bool, seed: int | None, weights: Sequence[float]
    ) -> None:
        super().__init__(samples, length, packing, seed)
        sources = samples.sources[:: samples.group]
        own = [np.flatnonzero(sources == source) for source in range(len(weights))]
        self._copies = [
            np.tile(members, math.floor(weight)) for members, weight in zip(own, weights, strict=True)
        ]
        self._parts = [
            (members, round((weight - math.floor(weight)) * len(members)))
            for members, weight in zip(own, weights, strict=True)
        ]
        self._changes = any(count for _, count in self._parts)

    def of(self, epoch: int) -> PackedRows:
        """Return the rows of an epoch; with packing some may be empty in epochs after the first."""
        return self._cached(epoch if self._packing or self._changes else 0)

    @property
    def draws(self) -> int:
        """Return the samples that an epoch draws."""
        return sum(len(members) for members in self._copies) + sum(count for _, count in self._parts)

    def _of(self, epoch: int) -> PackedRows:
        whole = np.concatenate(self._copies)
        part = self._drawn(epoch)
        if not self._packing:
            return PackedRows(
                np.sort(np.concatenate([whole, part]), kind="stable"), np.arange(self.draws + 1)
            )
        rows = self._packed(np.concatenate([whole, part]), epoch)
        if not self._changes:
            return rows
        wanted = self._rows()
        while len(rows) > wanted and len(part):
            # Other samples have other lengths: those that do not fit are left for another epoch.
            surplus = len(rows) - wanted
            part = part[: -max(1, surplus * self.draws // len(rows))]
            rows = self._packed(np.concatenate([whole, part]), epoch)
        missing = np.full(wanted - len(rows), rows.offsets[-1])
        return PackedRows(rows.samples, np.concatenate([rows.offsets, missing]))

    def _rows(self) -> int:
        """Return the number of rows of every epoch if epochs draw different samples."""
        whole = np.concatenate(self._copies)
        both = (whole, np.concatenate([whole, self._drawn(0)]))
        return max(len(self._packed(order, 0)) for order in both)

    def _drawn(self, epoch: int) -> np.ndarray:
        """Return an epoch's samples from sources with a fractional weight, in random order."""
        random = np.random.default_rng([self._seed or 0, epoch, 1])
        drawn = [random.choice(members, count, replace=False) for members, count in self._parts if count]
        return random.permutation(np.concatenate(drawn)) if drawn else np.zeros(0, np.int64)
