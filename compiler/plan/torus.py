"""Compute how fast a group of devices exchanges data over a slice's links.

A chip has one link in each direction of each dimension of its slice. A row of chips that is long enough is
closed to a ring. Collectives over several dimensions use the links of all these dimensions at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from recipec.compiler.lowering.hardware import Accelerator, generations

HOP_SECONDS = 1e-6
"""Seconds that each hop between neighbors adds to a collective (the scaling book, "How to think about
TPUs")."""


@dataclass(frozen=True)
class Torus:
    """The chips of one slice.

    Attributes:
        sizes: size of each dimension of the slice: (4, 4) for "4x4".
        closed: whether the rows along each dimension are rings.
        places: for each device in the order of the mesh, its chip's coordinates and its number on the chip.
        link: bytes/s of one link in one direction.
        dcn: bytes/s that a chip sends to other slices.
    """

    sizes: tuple[int, ...]
    closed: tuple[bool, ...]
    places: tuple[tuple[int, ...], ...]
    link: float
    dcn: float

    @property
    def on_chip(self) -> int:
        """Devices of a chip."""
        return 1 + max(place[-1] for place in self.places)

    @classmethod
    def of(cls, accelerator: Accelerator, places: Sequence[Sequence[int]]) -> Torus:
        """Return the torus of an accelerator.

        Args:
            places: for each device of one slice, the coordinates x, y, z and the number on the chip.
        """
        data = generations()[accelerator.generation]
        sizes = tuple(map(int, (accelerator.topology or "").split("x")))
        # Chips with 3 dimensions are wired in cubes of 4 x 4 x 4, chips with 2 in squares of 16 x 16.
        cube = 4 if len(sizes) == 3 else 16
        if len(sizes) == 3:
            closed = tuple(all(size % cube == 0 for size in sizes) for _ in sizes)
        else:
            closed = tuple(size == cube for size in sizes)
        # The published figure counts all links of a chip, in both directions.
        link = data["ici_gb_per_s"] * 1e9 / (4 * len(sizes))
        kept = tuple((*place[: len(sizes)], place[-1]) for place in places)
        return cls(sizes, closed, kept, link, data["dcn_gbit_per_s"] * 1e9 / 8)

    def seconds(self, kind: str, size: float, group: Sequence[int]) -> tuple[float, tuple[int, ...]]:
        """Return the seconds of a collective alone on its links, and the dimensions that it runs along.

        All devices of a chip take part in such a collective at the same time, in one group or another, and
        share the chip's links. If other devices are between a group's devices in a row, the groups share the
        row's links.

        Args:
            kind: "all-gather" and so on, except permutations.
            size: bytes of the array that a device ends with.
            group: numbers in the mesh of the devices that exchange data.
        """
        places = [self.places[device] for device in group]
        chips = {place[:-1] for place in places}
        if len(chips) < 2:
            return 0.0, ()
        spans = {d: sorted({chip[d] for chip in chips}) for d in range(len(self.sizes))}
        spans = {d: at for d, at in spans.items() if len(at) > 1}
        shared = self.on_chip * len(chips) / len(places)
        inwards, hops, stride = 0.0, 0.0, 1.0
        for dimension, at in spans.items():
            ring = self._ring(dimension, at)
            inwards += 2 if ring else 1
            hops += len(at) / 2 if ring else len(at) - 1
            stride = max(stride, (at[-1] - at[0]) / (len(at) - 1))
        share = 1 - 1 / len(chips)
        moved = {
            "all-reduce": 2 * share * size,
            "reduce-scatter": share * size * len(places),
            "all-to-all": max(
                inwards * size * len(places) / len(chips) * len(at) / (8 if self._ring(d, at) else 4)
                for d, at in spans.items()
            ),
        }.get(kind.removeprefix("ragged-"), share * size)
        rounds = 2 if kind == "all-reduce" else 1
        taken = shared * stride * moved / (inwards * self.link) + rounds * hops * HOP_SECONDS
        return taken, tuple(spans)

    def permutation(self, size: float, pairs: Sequence[Sequence[int]]) -> tuple[float, tuple[int, ...]]:
        """Return the same for a permutation: the time of the link with most bytes, and the dimensions.

        Each message takes the shorter way, along one dimension after the other.

        Args:
            size: bytes that a device sends.
            pairs: pairs of a source and a target device.
        """
        passed: Counter[tuple[tuple[int, ...], int, int]] = Counter()
        hops = 0
        for source, target in pairs:
            at, end = list(self.places[source][:-1]), self.places[target][:-1]
            links = [link for dimension in range(len(end)) for link in self._way(at, end, dimension)]
            passed.update(links)
            hops = max(hops, len(links))
        along = tuple(sorted({dimension for _, dimension, _ in passed}))
        return max(passed.values(), default=0) * size / self.link + hops * HOP_SECONDS, along

    def _way(
        self, at: list[int], end: Sequence[int], dimension: int
    ) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Move `at` along a dimension to `end`, and yield each link: its chip, dimension and direction."""
        count, closed = self.sizes[dimension], self.closed[dimension]
        ahead = (end[dimension] - at[dimension]) % count
        step = 1 if (ahead <= count / 2 if closed else at[dimension] < end[dimension]) else -1
        while at[dimension] != end[dimension]:
            yield tuple(at), dimension, step
            at[dimension] = (at[dimension] + step) % count

    def _ring(self, dimension: int, at: Sequence[int]) -> bool:
        return self.closed[dimension] and len(at) == self.sizes[dimension] > 2


def between_slices(torus: Torus, size: float) -> float:
    """Return the seconds of a transfer to another slice, in which every device of a chip takes part.

    Args:
        size: bytes that a device ends with.
    """
    return torus.on_chip * size / torus.dcn
