"""`recipe report`, and a reader of its page as a browser without scripts shows it."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from tests.plan.pages import figure

RUNNER = CliRunner()
GOLDEN = Path(__file__).parent / "golden"
CHANGING = "Values that the recipe does not give"
"""The text after this changes with the language and the pinned packages."""

VOID = {"meta", "br", "input"}
LINES = {"p", "h1", "h2", "h3", "li", "tr", "div", "dt", "summary", "section"}
HIDDEN = {"script", "style", "title"}


class Page(HTMLParser):
    """A page's elements and text.

    Attributes:
        elements: names with their attributes, in order.
        scripts: the texts of its scripts.
        figures: what Plotly draws, by key: "data" and "layout".
        charts: the traces of each plot by its key; those of the figure "curves" by their subject.
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[str] = []
        self._open: list[str] = []
        self._shown: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "elements that are not closed"
        drawn = [one for one in self.scripts if "Plotly.newPlot(" in one]
        self.figures: dict[str, dict[str, Any]] = dict(map(figure, drawn))
        self.charts: dict[str, list[dict[str, Any]]] = {}
        for key, found in self.figures.items():
            for trace in found["data"]:
                self.charts.setdefault(trace.get("meta", key), []).append(trace)

    @property
    def lines(self) -> list[str]:
        """Return the visible text, one element a line, with single spaces."""
        lines = (" ".join(line.split()) for line in "".join(self._shown).split("\n"))
        return [line for line in lines if line]

    @property
    def words(self) -> str:
        return " ".join(self.lines)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self._open.append(tag)
        if tag in LINES:
            self._shown.append("\n")
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        where = self._open[-1] if self._open else ""
        if where == "script":
            self.scripts[-1] += data
        elif where not in HIDDEN:
            self._shown.append(f" {' '.join(data.split())} ")

    def named(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def report(*words: str) -> Page:
    """Run the command, and return its page, page.html."""
    done = RUNNER.invoke(cli.app, ["report", *words, "-o", "page.html"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return Page(Path("page.html").read_text(encoding="utf-8"))


def refused(*words: str) -> str:
    """Return the command's output when it refuses."""
    done = RUNNER.invoke(cli.app, ["report", *words])
    assert done.exit_code != 0
    return f"{done.exit_code} {done.exception}{getattr(done.exception, 'help', '')}{done.output}"


def golden(name: str, page: Page, update: bool) -> None:
    """Compare a page's text with its golden file."""
    path, lines = GOLDEN / f"{name}.txt", page.lines
    text = "\n".join(lines[: lines.index(CHANGING)] if CHANGING in lines else lines) + "\n"
    if update:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
