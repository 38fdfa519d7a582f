"""Write a document as plain text, without its details. rich aligns its tables, and wraps its sentences."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, TYPE_CHECKING

from recipec.compiler.pages.document import (
    Block,
    Document,
    Facts,
    Gallery,
    Items,
    Plot,
    Section,
    Sides,
    Table,
    Text,
)
from recipec.compiler.pages.numbers import plain
from recipec.compiler.terminal import color, columns
from recipec.spec.diagnostics import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 100
"""Columns of sentences."""
UNLIMITED = 10_000
"""Columns of a table of which no cell is wrapped."""
WIDEST = 72
"""Columns of a cell that no other row is aligned with, where no cell is wrapped."""
INDENT = 2
REMARK = 6
"""Columns by which the sentence of a row is indented."""
GAP = "  "


def show(document: Document, most: int | None = None, stream: IO[str] | None = None) -> None:
    """Print a document within the width of a terminal; elsewhere each row of a table stays on one line.

    Args:
        most: the columns that it takes at most, in any place.
        stream: stdout if None.
    """
    stream = stream or sys.stdout
    widths = [width for width in (columns(stream), most) if width is not None]
    print(write(document, min(widths, default=None), color(stream)), end="", file=stream)


def write(document: Document, width: int | None = None, colors: bool = False) -> str:
    """Write the document. It omits plots, but not the tables below them.

    Args:
        width: columns within which the cells of tables are wrapped, and sentences too; None to write each row
            on one line, and to wrap sentences at WIDTH.
        colors: whether rows with a problem are red.
    """
    from rich.console import Console

    stream = io.StringIO()
    console = Console(
        file=stream,
        width=UNLIMITED,
        force_terminal=colors,
        color_system="standard" if colors else None,
        highlight=False,
        emoji=False,
    )
    sections = [section for section in document.sections if not section.detail]
    parts = [list(_head(document)), *(list(_section(section)) for section in sections)]
    written = []
    for part in filter(None, parts):
        stream.seek(0)
        stream.truncate()
        for block, indent in part:
            _print(console, block, indent, width)
        written.append(plain("\n".join(line.rstrip() for line in stream.getvalue().splitlines())))
    return "\n\n".join(filter(None, written)) + "\n"


Indented = tuple[Block, int]
"""A block, and the columns by which it is indented."""


def _head(document: Document) -> Iterator[Indented]:
    if document.name:
        yield Text(document.name), 0
    if document.hardware:
        yield Facts(document.hardware), INDENT
    if document.figures:
        lines = [(figure.name, "; ".join([figure.value, *figure.below])) for figure in document.figures]
        yield Facts(lines), INDENT
    for word, sentence in document.alarms:
        yield Text(f"{word} {sentence}"), 0
    if document.sentence:
        yield Text(document.sentence), 0


def _section(section: Section) -> Iterator[Indented]:
    """Yield the blocks of a section; below a heading they are indented."""
    indent = INDENT if section.title else 0
    for line in filter(None, [section.title, *section.aside]):
        yield Text(line), 0
    below = 0
    for block in section.blocks:
        heading = isinstance(block, Text) and block.look == "heading"
        yield from _flat(block, indent if heading else indent + below)
        below = INDENT if heading else below


def _flat(block: Block, indent: int) -> Iterator[Indented]:
    """Yield a block, and those that belong to it, as sentences, facts and tables."""
    if isinstance(block, Plot):
        for inner in block.after:
            yield from _flat(inner, indent)
        return
    if isinstance(block, Sides) or (not isinstance(block, Gallery) and block.detail):
        return
    if isinstance(block, Facts) and block.line:
        facts = ", ".join(f"{name} {value}" for name, value in block.pairs)
        yield Text(": ".join(filter(None, [block.title, facts]))), indent
        return
    title = block.folded if isinstance(block, Table) else block.title if isinstance(block, Facts) else ""
    if title:
        yield Text(title), indent
    yield block, indent + (INDENT if title else 0)
    if isinstance(block, Table):
        if block.excerpt and block.excerpt.rest and len(block.rows) > block.excerpt.rows:
            yield Text(f"and {len(block.rows) - block.excerpt.rows:,} more, {block.excerpt.rest}"), indent
        if block.note:
            yield Text(block.note), indent


def _print(console: Console, block: Block, indent: int, width: int | None) -> None:
    """Print a block. Each line of code, and each row of a table without `width`, stays one line."""
    from rich.padding import Padding
    from rich.text import Text as Line

    if isinstance(block, Table) and block.remarks:
        table = _excerpt(block)
        remarks = [*[""] * bool(_head_of(table)), *block.remarks]
        for row, remark in zip(_rows(table), remarks, strict=False):
            console.print(Padding(row, (0, 0, 0, indent), expand=False))
            if remark:
                below = Padding(Line(printable(remark)), (0, 0, 0, indent + REMARK), expand=False)
                console.print(below, width=width or WIDTH)
        return
    whole = isinstance(block, Table) if width is None else isinstance(block, Text) and block.look == "code"
    lines = _rows(_excerpt(block)) if width is None and isinstance(block, Table) else _lines(block)
    for line in lines:
        console.print(Padding(line, (0, 0, 0, indent), expand=False), width=None if whole else width or WIDTH)


def _excerpt(table: Table) -> Table:
    """Return what a terminal shows of a table."""
    if table.excerpt is None:
        return table
    columns = table.excerpt.columns or range(max(map(len, [table.head, *table.rows])))
    rows: list[Sequence[str]] = [table.head, *table.rows[: table.excerpt.rows]]
    head, *shown = [[row[column] for column in columns if column < len(row)] for row in rows]
    words = [place for place, column in enumerate(columns) if column in table.words]
    return replace(table, head=head, rows=shown, words=words)


def _lines(block: Block) -> Iterator[RenderableType]:
    from rich.text import Text as Line

    if isinstance(block, Table):
        if block.rows:
            yield _grid(_excerpt(block))
    elif isinstance(block, Facts):
        yield from (Line(printable(f"{name}: {value}")) for name, value in block.pairs)
    elif isinstance(block, Items):
        yield from map(_item, block.items)
    elif isinstance(block, Gallery):
        yield from map(_item, (picture.caption for picture in block.pictures))
    elif isinstance(block, Text):
        yield from map(Line, printable(block.words).split("\n"))


def _item(sentence: str) -> RenderableType:
    """Return a sentence after a dash, whose further lines begin below its first word."""
    from rich.table import Table as Grid
    from rich.text import Text as Line

    grid = Grid.grid(padding=(0, 1, 0, 0))
    grid.add_row("-", Line(printable(sentence)))
    return grid


def _head_of(table: Table) -> list[str]:
    return [*table.head] if any(table.head) else []


def _grid(table: Table) -> RenderableType:
    """Align a table, and wrap its cells: numbers to the right, names and words to the left."""
    from rich.table import Table as Grid
    from rich.text import Text as Cell

    head = _head_of(table)
    grid = Grid(box=None, pad_edge=False, padding=(0, len(GAP), 0, 0), show_header=bool(head))
    for column in range(max(len(row) for row in (head, *table.rows))):
        words = column == 0 or column in table.words
        title = Cell(printable(head[column])) if column < len(head) else ""
        if words:
            grid.add_column(title, overflow="fold")
        else:
            cells = [row[column] for row in (head, *table.rows) if column < len(row)]
            grid.add_column(title, justify="right", no_wrap=True, min_width=max(map(len, cells)))
    for index, row in enumerate(table.rows):
        grid.add_row(*(Cell(printable(cell), "red" if index in table.bad else "") for cell in row))
    return grid


def _rows(table: Table) -> Iterator[RenderableType]:
    """Align a table whose cells are not wrapped. A cell wider than WIDEST shifts only its own row."""
    from rich.cells import cell_len
    from rich.text import Text as Line

    if not table.rows:
        return
    head = [row for row in [_head_of(table)] if row]
    rows = [[printable(cell).replace("\n", " ") for cell in row] for row in [*head, *table.rows]]
    widths = [0] * max(map(len, rows))
    for row in rows:
        for column, cell in enumerate(row):
            widths[column] = max(widths[column], cell_len(cell) if cell_len(cell) <= WIDEST else 0)
    for index, row in enumerate(rows, start=-len(head)):
        cells = []
        for column, (cell, width) in enumerate(zip(row, widths, strict=False)):
            missing = " " * (width - cell_len(cell))
            cells.append(cell + missing if column == 0 or column in table.words else missing + cell)
        yield Line(GAP.join(cells).rstrip(), "red" if index in table.bad else "")
