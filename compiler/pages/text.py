"""Write a document as plain text. rich aligns its tables, and wraps its sentences."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import TYPE_CHECKING

from recipec.compiler.pages.document import Block, Document, Facts, Items, Plot, Section, Table, Text
from recipec.compiler.pages.numbers import plain
from recipec.spec.diagnostics import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

WIDTH = 100
"""Columns of sentences."""
UNLIMITED = 10_000
"""Columns of a table of which no cell is wrapped."""
INDENT = 2


def write(document: Document, width: int | None = None) -> str:
    """Write the document without colors. It omits plots, but not the tables below them.

    Args:
        width: columns within which the cells of tables are wrapped, and sentences too; None to write each row
            on one line, and to wrap sentences at WIDTH.
    """
    from rich.console import Console

    stream = io.StringIO()
    console = Console(file=stream, width=UNLIMITED, color_system=None, highlight=False, emoji=False)
    parts = [list(_head(document)), *(list(_section(section)) for section in document.sections)]
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
    for block in section.blocks:
        yield from _flat(block, indent)


def _flat(block: Block, indent: int) -> Iterator[Indented]:
    """Yield a block, and those that belong to it, as sentences, facts and tables."""
    if isinstance(block, Plot):
        for inner in block.after:
            yield from _flat(inner, indent)
        return
    title = block.folded if isinstance(block, Table) else block.title if isinstance(block, Facts) else ""
    if title:
        yield Text(title), indent
    yield block, indent + (INDENT if title else 0)
    if isinstance(block, Table) and block.note:
        yield Text(block.note), indent


def _print(console: Console, block: Block, indent: int, width: int | None) -> None:
    """Print a block. Each line of code, and each row of a table without `width`, stays one line."""
    from rich.padding import Padding

    whole = isinstance(block, Table) if width is None else isinstance(block, Text) and block.look == "code"
    for line in _lines(block):
        console.print(Padding(line, (0, 0, 0, indent), expand=False), width=None if whole else width or WIDTH)


def _lines(block: Block) -> Iterator[RenderableType]:
    from rich.text import Text as Line

    if isinstance(block, Table):
        if block.rows:
            yield _table(block)
    elif isinstance(block, Facts):
        yield from (Line(printable(f"{name}: {value}")) for name, value in block.pairs)
    elif isinstance(block, Items):
        yield from (Line(printable(f"- {item}")) for item in block.items)
    elif isinstance(block, Text):
        yield from map(Line, printable(block.words).split("\n"))


def _table(table: Table) -> RenderableType:
    """Align a table: numbers to the right, names and words to the left."""
    from rich.table import Table as Grid
    from rich.text import Text as Cell

    head = [*table.head] if any(table.head) else []
    grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head))
    for column in range(max(len(row) for row in (head, *table.rows))):
        words = column == 0 or column in table.words
        title = Cell(printable(head[column])) if column < len(head) else ""
        if words:
            grid.add_column(title, overflow="fold")
        else:
            cells = [row[column] for row in (head, *table.rows) if column < len(row)]
            grid.add_column(title, justify="right", no_wrap=True, min_width=max(map(len, cells)))
    for row in table.rows:
        grid.add_row(*(Cell(printable(cell)) for cell in row))
    return grid
