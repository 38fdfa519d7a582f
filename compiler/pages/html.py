"""One HTML file that opens without a network: sections of texts and tables, and figures that plotly draws."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from recipec.compiler.emitters.render import FOLDER
from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import install, missing_packages

if TYPE_CHECKING:
    from jinja2 import Environment

COLORS = ("#2f6fb0", "#1c8478", "#8a62bd", "#b05f0a", "#c04a84", "#7d7320", "#6d7480", "#c2453c")
"""What is drawn, in this order; each can be told from white paper and from dark, and white words from it."""
GRAY, INK = COLORS[6], "#7b8089"
"""Of what is behind, and of lines and words, which the style sheet gives the page's own color."""
SAID = "%{customdata}<extra></extra>"
SCRIPT = r"<script[^>]*>(.*?)</script>"
DIGITS = 6
"""Significant digits of what is drawn: a pixel is worth less."""


@dataclass(frozen=True)
class Figure:
    """A figure with its unit, what it is called, and lines below; `bad` when something is wrong with it."""

    name: str
    value: str
    below: tuple[str, ...] = ()
    bad: bool = False


@dataclass(frozen=True)
class Text:
    """A paragraph; `look` is "", "muted", "alarm", "heading", or "code", which keeps its lines."""

    words: str
    look: str = "muted"
    kind: ClassVar[str] = "text"


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]
    kind: ClassVar[str] = "items"


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: Iterable[tuple[str, Any]]
    title: str = ""
    kind: ClassVar[str] = "facts"


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first column is of names.

    Attributes:
        words: the columns of words, by number; the others, but for the first, are of numbers.
        label: for whoever cannot see it.
        folded: what unfolds it, "" where it is open.
        bad: rows that something is wrong with, by number.
    """

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    words: Sequence[int] = ()
    label: str = ""
    folded: str = ""
    bad: tuple[int, ...] = ()
    kind: ClassVar[str] = "table"


@dataclass(frozen=True)
class Plot:
    """What plotly draws.

    Attributes:
        key: of the element; one page has it once.
        title, what: the heading, and a sentence on what is seen.
        data, layout: as plotly has them; texts in them are escaped, for plotly takes them for markup.
        height: pixels.
        after: blocks below it: notes, and the table of its numbers.
    """

    key: str
    title: str
    data: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 320
    what: str = ""
    after: Sequence[Any] = ()
    kind: ClassVar[str] = "plot"

    @functools.cached_property
    def drawn(self) -> str:
        """The element and the call that draws it."""
        from plotly.io import to_html

        layout = {
            "margin": {"l": 56, "r": 12, "t": 12, "b": 44},
            "legend": {
                "orientation": "h",
                "yref": "container",
                "y": 0.01,
                "yanchor": "bottom",
                "x": 0,
                "traceorder": "normal",
            },
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "font": {"color": INK, "size": 12},
            "hoverlabel": {"font": {"size": 13}},
            **self.layout,
        }
        written: str = to_html(
            escaped({"data": list(self.data), "layout": layout}),
            config={"displaylogo": False, "displayModeBar": False},
            include_plotlyjs=False,
            full_html=False,
            default_height=f"{self.height}px",
            div_id=f"plot-{self.key}",
            validate=False,
        )
        return written


@dataclass(frozen=True)
class Section:
    """A part of the page, with what stands beside it."""

    key: str
    title: str
    aside: Sequence[str]
    blocks: Sequence[Any]


@dataclass(frozen=True)
class Page:
    """A page.

    Attributes:
        title: of the window.
        generator: by which a page is known, so that nothing else is overwritten.
        command: what made it, with the text of its badge.
        name: its heading.
        hardware: names and values below it.
        figures: the figures at the top.
        alarms: what must not be missed: a word and a sentence.
        sentence: below them.
    """

    title: str
    generator: str
    command: tuple[str, str]
    name: str
    hardware: Sequence[tuple[str, str]]
    figures: Sequence[Figure]
    sections: Sequence[Section]
    alarms: Sequence[tuple[str, str]] = ()
    sentence: str = ""


@functools.cache
def environment() -> Environment:
    """Unlike that of the artifacts' files, it escapes: names and settings come from users."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    return Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )


def require_plotly(what: str, extra: str) -> None:
    """Checks that plotly is installed, without importing it.

    Args:
        what: the command that draws with it.
        extra: that brings it.

    Raises:
        ArtifactError: it is not.
    """
    if missing_packages(["plotly"]):
        raise ArtifactError(f"{what} draws with plotly, which is not installed", install(extra))


def plotly() -> str:
    """Plotly's JavaScript."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def write(page: Page, extra: str) -> str:
    """The page's HTML, whose policy lets no script run but plotly's and the calls of it.

    Args:
        extra: that brings plotly.

    Raises:
        ArtifactError: it is not installed.
    """
    require_plotly(page.command[0], extra)
    library, template = plotly(), environment().get_template
    body = template("pages/body.html.j2").render(page=page)
    plots = [one.drawn for section in page.sections for one in section.blocks if one.kind == Plot.kind]
    # Of the plots alone: a script that came into the body in another way stays forbidden.
    scripts = [library, *(found for one in plots for found in re.findall(SCRIPT, one, re.DOTALL))]
    return template("pages/page.html.j2").render(
        page=page,
        body=body,
        library=library,
        style=template("pages/page.css.j2").render(),
        hashes=[script_hash(one) for one in scripts],
    )


def script_hash(script: str) -> str:
    """As a content security policy names a script: no other one may run."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def scatter(
    name: str, x: Sequence[Any], y: Sequence[Any], color: str, mode: str = "lines", **more: Any
) -> dict[str, Any]:
    """A curve or points; `more` is of plotly's."""
    line = {"color": color, "dash": more.pop("dash", "solid"), "width": more.pop("width", 2)}
    marker = {
        "color": color,
        "symbol": more.pop("symbol", "circle"),
        "size": more.pop("size", 7),
        "opacity": 1,
    }
    own = {"type": "scatter", "name": name, "x": x, "y": y, "mode": mode, "line": line, "marker": marker}
    return {**own, **_said(more)}


def bar(name: str, x: Sequence[Any], y: Sequence[Any], color: str, **more: Any) -> dict[str, Any]:
    """Bars; `more` is of plotly's."""
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color}, **_said(more)}


def _said(more: dict[str, Any]) -> dict[str, Any]:
    """`said` is a text for each point, shown at the pointer."""
    said = more.pop("said", None)
    return {**more, **({"customdata": said, "hovertemplate": SAID} if said is not None else {})}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def rule(x: float, words: str, line: int = 0, color: str = INK) -> tuple[dict[str, Any], dict[str, Any]]:
    """A vertical line, as a shape, and as an annotation what is said above it on a line of its own."""
    shape = {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": color}}
    place = {"x": x, "y": 1, "yref": "paper", "yshift": 2 + 16 * line, "xanchor": "right"}
    place["yanchor"] = "bottom"
    return shape, {**place, "text": words, "showarrow": False}


def escaped(value: Any) -> Any:
    """A figure for plotly: its texts are no markup, and its numbers have no digits that nobody sees."""
    if isinstance(value, str):
        return html.escape(value, quote=False)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: one if key == "hovertemplate" else escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(one) for one in value]
    return value
