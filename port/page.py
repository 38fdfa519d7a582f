"""The report of a port as an HTML page: source and result side by side, with links between their lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from recipec.compiler.pages.html import environment
from recipec.port.ledger import prefixes
from recipec.port.port import Ported
from recipec.port.read import Tree, conceal, parse_yaml
from recipec.port.report import WIDEST_VALUE, Row, headline, shown, summary
from recipec.port.source import Source
from recipec.spec.load import load


@dataclass
class Line:
    """A line of a file.

    Attributes:
        text: the text; values that look like secrets are hidden.
        anchor: the id of its element.
        rows: the report's rows on its keys.
        links: the anchors of the related lines on the other side, in order.
    """

    text: str
    number: int
    anchor: str
    rows: list[Row] = field(default_factory=list)
    links: dict[str, int] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """The most severe verdict on the line's keys, "" for none."""
        grave = sorted((row for row in self.rows), key=lambda row: (not row.learned, not row.changes))
        return grave[0].verdict.value if grave else ""

    @property
    def notes(self) -> list[str]:
        """The notes on the line's keys that change the run."""
        return [*dict.fromkeys(row.note for row in self.rows if row.changes and row.note)]


def page(made: Ported, name: str) -> str:
    """Return the page's HTML. It contains no JavaScript.

    Args:
        name: the name of the file that is written, or would be.
    """
    assert made.sources is not None
    sides = [(source.file, _lines(_text(source), f"s{n}")) for n, source in enumerate(made.sources.all())]
    result = _lines(made.text, "r")
    where = _places(made, name)
    files = dict(sides)
    for row in made.rows:
        lines = files.get(row.file, [])
        if row.line is None or row.line > len(lines):
            continue
        here = lines[row.line - 1]
        here.rows.append(row)
        if row.value == "***":
            here.text = re.sub(r"(:\s*).*", r"\1***", here.text)
        for path in row.recipe:
            number = next((where[at] for at in reversed([*prefixes(path)]) if at in where), None)
            if number is not None:
                there = result[number - 1]
                here.links[there.anchor] = number
                there.links[here.anchor] = here.number
    pages = environment()
    pages.filters["shown"] = lambda value: shown(value, WIDEST_VALUE)
    return pages.get_template("pages/port.html.j2").render(
        title=f"Port {'to' if made.to else 'from'} {made.title}",
        summary=summary(made.rows),
        errors=[found.message for found in made.diagnostics if found.severity == "error"],
        headline=headline(made.rows),
        sides=sides,
        result=result,
        name=name,
        anchors={
            (row.file, line.number): line.anchor for _, lines in sides for line in lines for row in line.rows
        },
        style=pages.get_template("pages/port.css.j2").render(),
    )


def _lines(text: str, prefix: str) -> list[Line]:
    return [
        Line(conceal(line), number, f"{prefix}-{number}") for number, line in enumerate(text.splitlines(), 1)
    ]


def _text(source: Source) -> str:
    return source.path.read_text(encoding="utf-8", errors="replace")


def _places(made: Ported, name: str) -> Mapping[str, int]:
    """Return the lines of the written file, by the paths of their keys."""
    return dict(_spans(made, name))


def _spans(made: Ported, name: str) -> Iterator[tuple[str, int]]:
    if made.to:
        tree = Tree(made.text, name)
        parse_yaml(tree)
        yield from ((path, span.line) for path, span in tree.keys.items())
        return
    sources = load(Path(name), text=made.text).sources
    for path in {path for row in made.rows for path in row.recipe}:
        span = sources.span(path, key=True)
        if span is not None and made.text:
            yield path, span.line
