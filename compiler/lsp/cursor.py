"""What is being typed at a place of a text."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.lsp.outline import Outline, Path
from compiler.lsp.scan import scan

MARK = "\ue000"
"""Stands at the cursor while the text is scanned: a private character, part of whatever is typed there."""


@dataclass(frozen=True)
class Cursor:
    """What is typed at a place.

    Attributes:
        outline: of the text as it would be with a character typed there.
        path: of the section whose key is typed, or of the value.
        key: whether a key is typed within `path`.
        value: whether the value of `path` is typed. On a line of its own it may be either.
        start, end: extent of the text that is typed, without quotes, in the document; the cursor is within.
        typed: the part before the cursor.
        flow: whether it stands within brackets.
        lead: what has to be put before a value: a blank after a colon.
        item: whether it is an item of a list that its dash or bracket has opened.
        quote: the quote that opens it, "" without one.
        colon: whether it is a key that has its colon.
    """

    outline: Outline
    path: Path
    key: bool
    value: bool
    start: int
    end: int
    typed: str
    flow: bool = False
    lead: str = ""
    item: bool = False
    quote: str = ""
    colon: bool = False


def cursor_at(source: str, offset: int) -> Cursor | None:
    """What is typed at a place; None within a comment or a text of several lines."""
    lead = " " if source[offset - 1 : offset] == ":" else ""
    outline = scan(f"{source[:offset]}{lead}{MARK}{source[offset:]}")
    at = offset + len(lead)

    def made(path: Path, start: int, end: int, **kind: bool) -> Cursor:
        quote = outline.source[start : start + 1]
        quote = quote if quote in ("'", '"') and start < at else ""
        start += len(quote)
        end -= 1 if quote and outline.source[end - 1 : end] == quote and end - 1 > at else 0
        typed = outline.source[start:at]
        # In the document there is neither the mark nor the blank before it.
        first = offset if start >= at else start
        last = max(offset, end - 1 - len(lead))
        return Cursor(outline, path, start=first, end=last, typed=typed, lead=lead, quote=quote, **kind)

    for word in outline.words:
        start, end = word.extent
        if start <= at < end:
            return made(word.path, start, end, key=True, value=not word.flow, flow=word.flow)
    for entry in outline.entries:
        if entry.key and entry.key[0] <= at < entry.key[1]:
            return made(entry.path[:-1], *entry.key, key=True, value=False, flow=entry.flow, colon=True)
        start, end = entry.value
        if start <= at < end and not entry.open and outline.source[start] not in "|>":
            item = entry.key is None
            return made(entry.path, start, end, key=item, value=True, flow=entry.flow, item=item)
    return None
