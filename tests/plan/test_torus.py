"""Tests of the time of collectives on a slice's links, against an exhaustive search.

An exchange takes at least the time to receive a part's bytes over the links into that part. The tests assume
that some schedule keeps these links busy. They try all parts, where the product uses formulas.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from recipec.compiler.lowering.hardware import from_name, generations
from recipec.compiler.plan.torus import HOP_SECONDS, Torus, between_slices

LINK, SIZE = 1e9, 6e9
"""Bytes/s of a link, and a device's final bytes, which make the time of hops negligible."""

Chip = tuple[int, ...]


def torus(sizes: Chip, closed: tuple[bool, ...] = (), on_chip: int = 1) -> Torus:
    places = [(*chip, core) for chip in chips(sizes) for core in range(on_chip)]
    return Torus(sizes, closed or (False,) * len(sizes), tuple(places), LINK, 1e8)


def chips(sizes: Chip) -> list[Chip]:
    return list(itertools.product(*map(range, sizes)))


def links(of: Torus) -> set[tuple[Chip, Chip]]:
    """Return the links from each chip to its neighbors."""
    found = set()
    for chip in chips(of.sizes):
        for dimension, count in enumerate(of.sizes):
            if chip[dimension] + 1 < count or (of.closed[dimension] and count > 2):
                next_one = list(chip)
                next_one[dimension] = (chip[dimension] + 1) % count
                found |= {(chip, tuple(next_one)), (tuple(next_one), chip)}
    return found


def busiest(of: Torus, needs: Callable[[int, int], float]) -> float:
    """Return the seconds of the part of a slice that takes longest to receive its bytes.

    Args:
        needs: the bytes that a part of so many chips receives from so many others.
    """
    every, wires = chips(of.sizes), links(of)
    worst = 0.0
    for count in range(1, len(every)):
        for part in map(set, itertools.combinations(every, count)):
            inwards = sum(source not in part and target in part for source, target in wires)
            worst = max(worst, needs(count, len(every) - count) / (inwards * LINK))
    return worst


SHAPES = [
    ((2,), (False,)),
    ((4,), (False,)),
    ((4,), (True,)),
    ((7,), (True,)),
    ((2, 2), (False, False)),
    ((2, 4), (False, False)),
    ((3, 3), (False, False)),
    ((2, 4), (False, True)),
    ((3, 3), (True, True)),
    ((2, 2, 2), (False, False, False)),
    ((2, 2, 3), (False, False, True)),
]


@pytest.mark.parametrize("on_chip", [1, 2])
@pytest.mark.parametrize(("sizes", "closed"), SHAPES)
def test_collective_times_match_an_exhaustive_search(
    sizes: Chip, closed: tuple[bool, ...], on_chip: int
) -> None:
    of = torus(sizes, closed, on_chip)
    group = range(len(of.places))
    share = SIZE / len(of.places)

    def taken(kind: str) -> float:
        seconds, along = of.seconds(kind, SIZE, group)
        assert along == tuple(range(len(sizes)))
        return seconds

    gather = busiest(of, lambda inside, outside: outside * on_chip * share)
    assert taken("all-gather") == pytest.approx(gather, rel=1e-4)
    assert taken("all-reduce") == pytest.approx(2 * gather, rel=1e-4)
    # Each device ends with its part of a sum, which is larger by the number of devices.
    assert of.seconds("reduce-scatter", share, group)[0] == pytest.approx(gather, rel=1e-4)
    if all(count % 2 == 0 for count in sizes):
        exchange = busiest(of, lambda inside, outside: inside * outside * on_chip**2 * share)
        assert taken("all-to-all") == taken("ragged-all-to-all") == pytest.approx(exchange, rel=1e-4)


def test_all_gather_is_faster_on_a_ring_and_over_two_dimensions() -> None:
    line, ring = torus((8,)), torus((8,), (True,))
    assert line.seconds("all-gather", SIZE, range(8))[0] == pytest.approx(7 / 8 * SIZE / LINK, rel=1e-4)
    assert ring.seconds("all-gather", SIZE, range(8))[0] == pytest.approx(7 / 16 * SIZE / LINK, rel=1e-4)
    square = torus((2, 2))
    assert square.seconds("all-gather", SIZE, range(4)) == (
        pytest.approx(3 / 8 * SIZE / LINK, rel=1e-4),
        (0, 1),
    )
    assert square.seconds("all-gather", SIZE, (0, 1)) == (pytest.approx(SIZE / 2 / LINK, rel=1e-4), (1,))
    assert square.seconds("all-gather", SIZE, (0, 2)) == (pytest.approx(SIZE / 2 / LINK, rel=1e-4), (0,))


def test_interleaved_groups_share_links_and_take_twice_as_long() -> None:
    """Share the middle link of a row of four between the groups (0, 2) and (1, 3)."""
    row = torus((4,))
    near, far = (row.seconds("all-gather", SIZE, group)[0] for group in ((0, 1), (0, 2)))
    assert far == pytest.approx(2 * near, rel=1e-4)
    # A row in its own dimension shares its links with no other row.
    mesh = torus((2, 4))
    assert mesh.seconds("all-gather", SIZE, (0, 4))[0] == pytest.approx(near, rel=1e-4)


def test_devices_of_one_chip_share_its_links_and_exchange_for_free() -> None:
    of = torus((2,), on_chip=2)
    assert of.seconds("all-gather", SIZE, (0, 1)) == (0.0, ())
    assert of.permutation(SIZE, ((0, 1), (1, 0), (2, 3), (3, 2))) == (0.0, ())
    # Two groups, each with a device of each chip; or one group of all four devices, which needs half as much.
    apart, together = (of.seconds("all-gather", SIZE, group)[0] for group in ((0, 2), range(4)))
    assert apart == pytest.approx(SIZE / LINK, rel=1e-4)
    assert together == pytest.approx(SIZE / 2 / LINK, rel=1e-4)


def shift(count: int, by: int) -> list[tuple[int, int]]:
    return [(device, (device + by) % count) for device in range(count)]


@pytest.mark.parametrize(
    ("closed", "by", "loads"),
    [(True, 1, 1), (True, 7, 1), (True, 2, 2), (False, 1, 1), (False, 2, 2), (False, 3, 3)],
)
def test_permutation_time_is_the_load_of_the_busiest_link(closed: bool, by: int, loads: int) -> None:
    """Shift a row of eight devices.

    In a ring, a shift by one loads each link once. In an open row, the last device sends all the way back,
    over links in the other direction.
    """
    seconds, along = torus((8,), (closed,)).permutation(SIZE, shift(8, by))
    assert seconds == pytest.approx(loads * SIZE / LINK, rel=1e-4) and along == (0,)


def test_permutation_names_its_dimensions_and_identity_takes_no_time() -> None:
    of = torus((2, 2))
    assert of.permutation(SIZE, [(0, 3), (3, 0)]) == (pytest.approx(SIZE / LINK, rel=1e-4), (0, 1))
    assert of.permutation(SIZE, [(0, 1), (1, 0)])[1] == (1,)
    assert of.permutation(SIZE, [(0, 0)]) == (0.0, ())
    pair = torus((2,), on_chip=2)
    assert pair.permutation(SIZE, shift(4, 2))[0] == pytest.approx(2 * SIZE / LINK, rel=1e-4)


def test_small_collectives_take_the_latency_of_their_hops() -> None:
    line, ring = torus((8,)), torus((8,), (True,))
    assert line.seconds("all-gather", 8, range(8))[0] == pytest.approx(7 * HOP_SECONDS, rel=0.01)
    assert ring.seconds("all-gather", 8, range(8))[0] == pytest.approx(4 * HOP_SECONDS, rel=0.01)
    assert ring.seconds("all-reduce", 8, range(8))[0] == pytest.approx(8 * HOP_SECONDS, rel=0.01)
    assert line.permutation(8, [(0, 5)])[0] == pytest.approx(5 * HOP_SECONDS, rel=0.01)


@pytest.mark.parametrize(
    ("name", "sizes", "closed"),
    [
        ("v5p-8", (2, 2, 1), (False,) * 3),
        ("v5p-128", (4, 4, 4), (True,) * 3),
        ("v5e-16", (4, 4), (False, False)),
        ("v6e-256", (16, 16), (True, True)),
        ("v6e-128", (8, 16), (False, True)),
        ("tpu7x-8", (2, 2, 1), (False,) * 3),
    ],
)
def test_accelerator_torus_has_its_sizes_wraparound_and_bandwidth(
    name: str, sizes: Chip, closed: tuple[bool, ...]
) -> None:
    """Compute with the published bandwidth, which is the total of a chip's links, in and out."""
    accelerator = from_name(name)
    cores = accelerator.devices_per_chip
    given = [(*chip, *(0,) * (3 - len(chip)), core) for chip in chips(sizes) for core in range(cores)]
    of = Torus.of(accelerator, given)
    assert (of.sizes, of.closed, of.on_chip) == (sizes, closed, cores)
    data = generations()[accelerator.generation]
    assert of.link * 4 * len(sizes) == pytest.approx(data["ici_gb_per_s"] * 1e9)
    assert set(of.places) == {(*chip, core) for chip in chips(sizes) for core in range(cores)}


def test_devices_of_one_chip_share_its_dcn_bandwidth() -> None:
    v6e = Torus.of(from_name("v6e-8"), [(0, 0, 0, 0), (0, 1, 0, 0)])
    assert between_slices(v6e, 1e9) == pytest.approx(8e9 / (generations()["v6e"]["dcn_gbit_per_s"] * 1e9))
    tpu7x = Torus.of(from_name("tpu7x-8"), [(0, 0, 0, 0), (0, 0, 0, 1)])
    assert between_slices(tpu7x, 1e9) == pytest.approx(
        2 * 8e9 / (generations()["tpu7x"]["dcn_gbit_per_s"] * 1e9)
    )
