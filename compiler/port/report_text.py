"""The report of a port as a table for the terminal: a line for each key, and its note below."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from compiler.port.ledger import Verdict
from compiler.port.report import Row, shown, summary
from spec.diagnostics import printable

COLORS = {
    Verdict.EXACT: "green",
    Verdict.APPROXIMATED: "yellow",
    Verdict.DEFAULTED: "cyan",
    Verdict.UNSUPPORTED: "red",
    Verdict.UNUSED: "dim",
}
WIDEST_KEY, WIDEST_VALUE = 48, 36
"""Columns; a longer key moves the rest of its line, a longer value is cut."""
INDENT = 9
"""Columns that a note is set in."""


def text(title: str, files: Sequence[str], made: Sequence[Row], width: int, color: bool) -> str:
    """The table, by file.

    Args:
        title: of the tool.
        width: of the terminal, in columns.
    """
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=color, no_color=not color, legacy_windows=False)
    for line in _lines(title, files, made, max(width, 60)):
        console.print(line, soft_wrap=True, highlight=False)
    return stream.getvalue()


def _lines(title: str, files: Sequence[str], made: Sequence[Row], width: int) -> Iterator[Text]:
    for file in [*files, ""]:
        part = [row for row in made if row.file == file]
        if part:
            yield Text(printable(file) or f"{title}'s defaults, written out", style="bold")
            yield from _table(part, width)
            yield Text()
    yield Text(f"{title}: {summary(made)}")


def _table(part: Sequence[Row], width: int) -> Iterator[Text]:
    cells = [(printable(row.key), printable(shown(row.value, WIDEST_VALUE))) for row in part]
    keys = max((len(key) for key, _ in cells if len(key) <= WIDEST_KEY), default=0)
    values = max(len(value) for _, value in cells)
    verdicts = max(len(verdict.value) for verdict in Verdict)
    for row, (key, value) in zip(part, cells, strict=True):
        line = Text(f"{row.line or '':>6} {key:<{keys}}  {value:<{values}}  ")
        line.append(f"{row.verdict.value:<{verdicts}}", style=COLORS[row.verdict])
        line.append(f"  {', '.join(row.recipe)}" if row.recipe else "")
        line.rstrip()
        yield line
        for note in textwrap.wrap(printable(row.note), width - INDENT):
            yield Text(f"{'':{INDENT}}{note}", style="dim")
