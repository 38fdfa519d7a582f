"""The files of a port next to each other, whose lines link to each other, for the page of its report."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from recipec.compiler.pages.document import Line, Listing, Sides
from recipec.port.ledger import prefixes
from recipec.port.port import Ported
from recipec.port.read import Tree, conceal, parse_yaml
from recipec.port.report import Row
from recipec.port.source import Source
from recipec.spec.load import load


def sides(ported: Ported, name: str) -> Sides:
    """Return the source's files and the result. Values that look like secrets are hidden.

    Args:
        name: the name of the file that is written, or would be.
    """
    assert ported.sources is not None
    left = [
        Listing(source.file, _lines(_text(source), f"s{number}"))
        for number, source in enumerate(ported.sources.all())
    ]
    right = Listing(name, _lines(ported.text, "r"))
    places = dict(_places(ported, name))
    files = {listing.name: listing.lines for listing in left}
    rows: dict[str, list[Row]] = {}
    for row in ported.rows:
        lines = files.get(row.file, [])
        if row.line is None or row.line > len(lines):
            continue
        here = lines[row.line - 1]
        rows.setdefault(here.id, []).append(row)
        if row.value == "***":
            here.text = re.sub(r"(:\s*).*", r"\1***", here.text)
        for there in _related(row, right, places):
            here.links[there.id] = there.number
            there.links[here.id] = here.number
        here.mark = _mark(rows[here.id])
        here.notes = [*dict.fromkeys(row.note for row in rows[here.id] if row.changes and row.note)]
    return Sides(left, [right])


def _mark(rows: list[Row]) -> str:
    """Return the most severe verdict on a line's keys, if the run differs because of it."""
    gravest = min(rows, key=lambda row: (not row.learned, not row.changes))
    return gravest.verdict.value if gravest.verdict.value in ("approximated", "unsupported") else ""


def _related(row: Row, result: Listing, places: Mapping[str, int]) -> Iterator[Line]:
    """Yield the lines of the result that a key sets."""
    for path in row.recipe:
        number = next((places[at] for at in reversed([*prefixes(path)]) if at in places), None)
        if number is not None:
            yield result.lines[number - 1]


def _lines(text: str, prefix: str) -> list[Line]:
    return [
        Line(conceal(line), number, f"{prefix}-{number}") for number, line in enumerate(text.splitlines(), 1)
    ]


def _text(source: Source) -> str:
    return source.path.read_text(encoding="utf-8", errors="replace")


def _places(ported: Ported, name: str) -> Iterator[tuple[str, int]]:
    """Yield the paths of the written file's keys, with their lines."""
    if ported.to:
        tree = Tree(ported.text, name)
        parse_yaml(tree)
        yield from ((path, span.line) for path, span in tree.keys.items())
        return
    sources = load(Path(name), text=ported.text).sources
    for path in {path for row in ported.rows for path in row.recipe}:
        span = sources.span(path, key=True)
        if span is not None and ported.text:
            yield path, span.line
