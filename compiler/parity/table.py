"""Show a comparison as a table, or as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipec.compiler.parity.compare import CONTROL, Deviation
from recipec.compiler.rehearse.pipeline import say

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {
    "targets": "target tokens",
    "rows": "rows",
    "initial": "first adapters",
    "gradients": "first gradients",
    "losses": "losses",
    "trained": "what was trained",
    "merged": "merged weights",
}


def print_rows(
    console: Console,
    title: str,
    rows: Sequence[Deviation],
    control: Sequence[Deviation] = (),
    left_out: Mapping[str, str] = {},
) -> None:
    """Print the table, then what it leaves out.

    Args:
        control: deviations of a run from its repetition with perturbed initial adapters.
        left_out: why a backend did not take part, by its name.
    """
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("quantity", "runs"):
        table.add_column(column)
    for column in ("difference", "of", "relative", "limit"):
        table.add_column(column, justify="right")
    table.add_column("result")
    table.add_column("where", overflow="fold")
    for row in [*rows, *control]:
        shown = (
            "control" if row in control else "failed" if not row.ok else "ok" if row.limit is not None else ""
        )
        table.add_row(
            WORDS[row.quantity],
            f"{row.left} - {row.right}",
            number(row.difference),
            number(row.largest),
            number(row.relative),
            number(row.limit) if row not in control else "",
            shown,
            row.note,
            style="red" if shown == "failed" else "",
        )
    console.print(table)
    if control:
        say(
            console,
            f"control: {control[0].left} against itself, its first adapters moved by 1e-7. A small random "
            f"model may be chaotic: a limit is {CONTROL:g} times the control, or the tolerance if that "
            "is larger",
        )
    for name, reason in left_out.items():
        say(console, f"left out: {name}: {reason}")


def to_dict(
    rows: Iterable[Deviation], control: Iterable[Deviation] = (), left_out: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return the comparison as plain JSON values."""
    rows = list(rows)
    return {
        "ok": all(row.ok for row in rows),
        "rows": [row.to_dict() for row in rows],
        "control": [row.to_dict() for row in control],
        "left_out": dict(left_out),
    }


def number(value: float | None) -> str:
    """Write a number: "3.1e-7", "0", "1,024"; "-" for None."""
    if value is None:
        return "-"
    if value == int(value) and abs(value) < 1e6:
        return f"{int(value):,}"
    if 1e-2 <= abs(value) < 1e4:
        return f"{value:.3g}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
