"""Format a plan's figures: GiB of memory, GB of traffic, TFLOP, ms, US$."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from recipec.compiler.plan.results import Collective
from recipec.compiler.wording import listing

WIDTH = 100
"""Columns of printed text."""

PREFIXES = (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def gib(count: float) -> str:
    """Format bytes of memory as GiB, without the unit: "14.62"."""
    return f"{count / 2**30:,.2f}"


def flops(count: float) -> str:
    """Format a number of FLOPs: "372.4 TFLOP"."""
    return _scaled(count, "FLOP", "T")


def traffic(count: float) -> str:
    """Format bytes of traffic: "118.4 GB", "2.1 MB"."""
    return _scaled(count, "B", "G")


def milliseconds(seconds: float) -> str:
    """Format seconds as milliseconds: "1,294.1 ms", or "0.214 ms" for short times."""
    number = 1e3 * seconds
    return f"{number:,.1f} ms" if number >= 10 else f"{number:.3g} ms"


def duration(seconds: float) -> str:
    """Format the seconds that a command took: "81 s", "0.7 s"."""
    return f"{seconds:,.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def percent(share: float) -> str:
    """Format a share: "76.3 %"."""
    return f"{100 * share:.1f} %"


def groups(collective: Collective) -> str:
    """Name the axes that a collective runs over: "fsdp", "fsdp and tp over DCN"."""
    axes = listing(collective.axes) or "other groups"
    return f"{axes} over DCN" if collective.over_dcn else axes


def wrapped(text: str, indent: str = "") -> list[str]:
    """Wrap a sentence into lines of at most WIDTH columns."""
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def aligned(rows: Sequence[Sequence[str]], align: str, indent: str = "  ") -> list[str]:
    """Format rows as lines with aligned columns.

    Args:
        align: "<" or ">" for each column.
    """
    widths = [max((len(row[i]) for row in rows if i < len(row)), default=0) for i in range(len(align))]
    return [
        indent
        + "  ".join(
            f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=False)
        ).rstrip()
        for row in rows
    ]


def _scaled(count: float, unit: str, largest: str) -> str:
    allowed = PREFIXES[[prefix for prefix, _ in PREFIXES].index(largest) :]
    prefix, size = next((item for item in allowed if abs(count) >= item[1]), ("", 1.0))
    number = count / size
    digits = 1 if prefix and abs(number) < 1000 else 0
    return f"{number:,.{digits}f} {prefix}{unit}"
