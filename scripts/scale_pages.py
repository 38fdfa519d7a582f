"""The tables of docs/scale.md, from the figures in recipes/scale.json."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.plan.results import Collective
from recipec.compiler.plan.search import received
from recipec.compiler.wording import mesh_axes
from scripts.recipe_pages import Planned, span, table, thousands

DCN_BYTES = {"v5p": 6.25e9, "v6e": 12.5e9}
"""Bytes/s of a chip over the data center's network, each way: https://jax-ml.github.io/scaling-book/tpus/"""

SAMPLES, SAMPLE_TOKENS = 1244 * 8, 922
"""Samples of an epoch of the published run (arXiv 2605.25645), and the mean tokens of a sample."""


@dataclass(frozen=True)
class Scaled:
    """The results of `recipe plan` for the flagship on one machine.

    Attributes:
        accelerator: of one slice.
        chips, hosts: total over all slices.
        rows: of an optimizer step.
        collectives: of a micro-batch on one device.
    """

    accelerator: str
    generation: str
    chips: int
    hosts: int
    slices: int
    axes: Mapping[str, int]
    rows: int
    collectives: Sequence[Collective]
    planned: Planned

    @property
    def fits(self) -> bool:
        return self.planned.memory.headroom >= 0

    @property
    def computing(self) -> float:
        """Return the seconds of an optimizer step by the compiler, which counts no time on links."""
        return self.planned.seconds * self.planned.micro_batches

    @property
    def ici_seconds(self) -> float:
        """Return the seconds that a step's collectives take on a slice's links if nothing hides them."""
        return self.received(over_dcn=False) / link_bytes(self.accelerator)

    @property
    def dcn_seconds(self) -> float:
        """Return the seconds that a step's exchange between slices takes."""
        return self.received(over_dcn=True) / DCN_BYTES[self.generation]

    @property
    def exposed(self) -> float:
        """Return the seconds of an optimizer step if nothing hides its collectives."""
        return self.computing + self.ici_seconds + self.dcn_seconds

    def received(self, over_dcn: bool) -> float:
        """Return the bytes that a chip receives from others in an optimizer step."""
        one = sum(received(c, self.axes) for c in self.collectives if c.over_dcn == over_dcn)
        return one * self.planned.micro_batches

    def per_chip(self, seconds: float) -> float:
        """Return a chip's tokens/s, at the given seconds per step."""
        return self.planned.tokens / seconds / self.chips

    def usd_per_million(self, seconds: float) -> float:
        """Return US$ per million tokens, at the given seconds per step."""
        return (self.planned.usd_per_hour or math.nan) / 3600 * seconds / self.planned.tokens * 1e6


@dataclass(frozen=True)
class Record:
    """The contents of recipes/scale.json.

    Attributes:
        cases: by name: "v5p-32", "v5p-32 tp 2, 4 rows", "2 x v5p-32".
    """

    cases: dict[str, Scaled]


def link_bytes(accelerator: str) -> float:
    """Return the bytes/s that a chip of a slice receives over its links from all sides.

    A chip has two links in each dimension, which share its bandwidth evenly. In a dimension without
    wrap-around, a chip at the end lacks one neighbor, and these chips set the pace. Slices of v5p wrap around
    from 4x4x4 on, slices of v6e in a dimension of 16.
    """
    found = from_name(accelerator)
    sizes = [int(size) for size in (found.topology or "").split("x")]
    wraps = [all(size % 4 == 0 for size in sizes) if len(sizes) == 3 else size == 16 for size in sizes]
    links = sum(0 if size == 1 else 2 if wrap else 1 for size, wrap in zip(sizes, wraps, strict=True))
    return links * (found.ici_gb_per_s or 0) * 1e9 / 2 / (2 * len(sizes))


def page(text: str, record: Record, missing: Sequence[str] = ()) -> str:
    """Return docs/scale.md with new tables, each between `<!-- NAME -->` and `<!-- end -->`.

    Args:
        missing: cases that were not compiled.

    Raises:
        ArtifactError: the page lacks the place of a table.
    """
    for name, lines in tables(record, missing).items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if not found or end not in rest:
            raise ArtifactError(f"docs/scale.md has no place for the table {name}", f"{start}{end}")
        text = f"{before}{start}\n{lines}\n{rest[rest.index(end) :]}"
    return text


def tables(record: Record, missing: Sequence[str] = ()) -> dict[str, str]:
    """Return the tables by name."""
    cases = record.cases
    growing = {name: one for name, one in cases.items() if one.slices == 1 and one.rows == one.chips}
    fitting = [one for one in growing.values() if one.fits]
    v5p = [one for one in fitting if one.generation == "v5p"]
    v6e = [one for one in fitting if one.generation == "v6e"]
    split = [v5p[0], *(one for one in cases.values() if one.slices == 1 and one.rows < one.chips)]
    return {
        "versions": _versions([one.planned for one in cases.values()], missing),
        "v5p": _steps(v5p),
        "v6e": _steps(v6e),
        "collectives": _exchanged([*v5p, *v6e]),
        "too large": _too_large([one for one in growing.values() if not one.fits]),
        "split": _steps(split),
        "slices": _slices([one for one in cases.values() if one.slices > 1], fitting),
        "epoch": _epochs([*v5p, *v6e]),
    }


def _versions(all_of: Sequence[Planned], missing: Sequence[str]) -> str:
    versions, dates = all_of[0].versions, sorted({one.date for one in all_of})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    left_out = f" Not compiled, and left out: {'; '.join(missing)}." if missing else ""
    return f"Compiled with libtpu {versions['libtpu']} and jax {versions['jax']} on {when}.{left_out}\n"


def _steps(found: Sequence[Scaled]) -> str:
    """Return memory, time and price, with hidden and exposed collectives; efficiency is relative to the
    first row."""
    head = ("Machine", "Chips, hosts", "Mesh", "Rows a step", "HBM, GiB")
    times = ("Step, s", "Tokens/s", "Efficiency of a chip", "US$ a million tokens")
    first, rows = found[0], []
    for one in found:
        hidden, exposed = (
            one.per_chip(seconds) / first.per_chip(base)
            for seconds, base in ((one.computing, first.computing), (one.exposed, first.exposed))
        )
        memory, both = one.planned.memory, (one.computing, one.exposed)
        rows.append(
            (
                _machine(one),
                f"{one.chips}, {one.hosts}",
                mesh_axes(one.axes),
                str(one.rows),
                f"{memory.used / 2**30:.1f} of {memory.available / 2**30:.2f}",
                span(*both, 2),
                " to ".join(thousands(one.chips * one.per_chip(seconds)) for seconds in reversed(both)),
                _both(f"{hidden:.0%}", f"{exposed:.0%}"),
                span(one.usd_per_million(both[0]), one.usd_per_million(both[1]), 2),
            )
        )
    return table((*head, *times), rows)


def _exchanged(found: Sequence[Scaled]) -> str:
    """Return what a chip receives in a step, and how long its links take."""
    kinds = {"all-gather": "All-gather", "all-reduce": "all-reduce", "": "others"}
    head = ("Machine", *(f"{kind}, GB" for kind in kinds.values()), "Links, GB/s", "Links, s", "Computing, s")
    rows = []
    for one in found:
        sums = dict.fromkeys(kinds, 0.0)
        for collective in one.collectives:
            kind = collective.kind if collective.kind in kinds else ""
            sums[kind] += received(collective, one.axes) * one.planned.micro_batches
        speed = link_bytes(one.accelerator)
        rows.append(
            (
                _machine(one),
                *(f"{size / 1e9:.1f}" for size in sums.values()),
                f"{speed / 1e9:.0f}",
                f"{one.ici_seconds:.2f}",
                f"{one.computing:.2f}",
            )
        )
    return table(head, rows)


def _too_large(found: Sequence[Scaled]) -> str:
    head = ("Machine", "Mesh", "HBM, GiB", "Of which temporaries")
    rows = [
        (
            _machine(one),
            mesh_axes(one.axes),
            f"{one.planned.memory.used / 2**30:.1f} of {one.planned.memory.available / 2**30:.2f}",
            f"{one.planned.memory.temporaries / 2**30:.1f}",
        )
        for one in found
    ]
    return table(head, rows)


def _slices(found: Sequence[Scaled], whole: Sequence[Scaled]) -> str:
    """Compare several slices with one slice of as many chips."""
    head = ("Machine", "Chips", "Mesh", "HBM, GiB", "Over DCN, GB", "DCN, s", "Links, s", "Step, s")
    rows = []
    for one in found:
        same = [other for other in whole if (other.generation, other.chips) == (one.generation, one.chips)]
        for shown in (*same, one):
            rows.append(
                (
                    _machine(shown),
                    str(shown.chips),
                    mesh_axes(shown.axes),
                    f"{shown.planned.memory.used / 2**30:.1f}",
                    f"{shown.received(over_dcn=True) / 1e9:.2f}",
                    f"{shown.dcn_seconds:.3f}",
                    f"{shown.ici_seconds:.2f}",
                    span(shown.computing, shown.exposed, 2),
                )
            )
    return table(head, rows)


def _epochs(found: Sequence[Scaled]) -> str:
    """Return the time of an epoch of the published run's size, with its samples packed."""
    head = ("Machine", "Rows a step", "Steps an epoch", "Minutes", "US$")
    rows = []
    for one in found:
        length = one.planned.tokens / one.rows
        steps = math.ceil(SAMPLES * SAMPLE_TOKENS / length / one.rows)
        low, high = (steps * seconds / 60 for seconds in (one.computing, one.exposed))
        usd = (one.planned.usd_per_hour or math.nan) / 60
        rows.append(
            (_machine(one), str(one.rows), str(steps), span(low, high, 1), span(low * usd, high * usd, 2))
        )
    return table(head, rows)


def _machine(one: Scaled) -> str:
    return f"{one.slices} x {one.accelerator}" if one.slices > 1 else one.accelerator


def _both(low: str, high: str) -> str:
    return low if low == high else f"{low}, {high}"
