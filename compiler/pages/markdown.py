"""Write a document as Markdown, or only a table of it. It omits plots, but not the tables below them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

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

HEADINGS = ("#", "##", "###")
"""Of the document, of a section, and within one."""


def write(document: Document) -> str:
    """Return the page, with the document's name as its heading."""
    figures = [(figure.name, "; ".join([figure.value, *figure.below])) for figure in document.figures]
    parts = [
        *_heading(document.name, 0),
        *_facts(document.hardware),
        *_facts(figures),
        *(f"**{word}** {sentence}" for word, sentence in document.alarms),
        document.sentence,
        *(part for section in document.sections for part in _section(section)),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def table(rows: Table) -> list[str]:
    """Return the lines of a table. Names and words are left-aligned, numbers right-aligned."""
    rows = rows.with_remarks
    left = {0, *rows.words}
    rule = ("---" if column in left else "---:" for column in range(len(rows.head)))
    return [_row(rows.head), f"|{'|'.join(rule)}|", *(_row(row, rows.code) for row in rows.rows)]


def _row(cells: Sequence[str], code: Sequence[int] = ()) -> str:
    texts = [_code(cell) if column in code else cell for column, cell in enumerate(cells)]
    return "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in texts) + " |"


def _code(text: str) -> str:
    fence, space = ("``", " ") if "`" in text else ("`", "")
    return f"{fence}{space}{text}{space}{fence}" if text else ""


def _section(section: Section) -> Iterator[str]:
    yield from _heading(section.title, 1)
    yield from section.aside
    for block in section.blocks:
        yield from _block(block)


def _block(block: Block) -> Iterator[str]:
    """Yield the paragraphs of a block."""
    if isinstance(block, Table):
        yield from _heading(block.folded, 2)
        yield "\n".join(table(block))
        yield block.note
    elif isinstance(block, Facts):
        yield from _heading(block.title, 2)
        yield from _facts(block.pairs)
    elif isinstance(block, Items):
        yield "\n".join(f"- {item}" for item in block.items)
    elif isinstance(block, Gallery):
        yield "\n".join(f"- {picture.caption}" for picture in block.pictures)
    elif isinstance(block, Plot):
        yield from (part for inner in block.after for part in _block(inner))
    elif not isinstance(block, Sides):
        yield from _text(block)


def _text(text: Text) -> Iterator[str]:
    if text.look == "heading":
        yield from _heading(text.words, 2)
    elif text.look == "code":
        yield f"```text\n{text.words}\n```"
    else:
        yield text.words


def _heading(title: str, level: int) -> list[str]:
    return [f"{HEADINGS[level]} {title}"] if title else []


def _facts(pairs: Collection[tuple[str, Any]]) -> list[str]:
    return ["\n".join(f"- {name}: {value}" for name, value in pairs)] if pairs else []
