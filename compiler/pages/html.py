"""Write a document as one HTML file that opens without a network. plotly draws its plots."""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import install, missing_packages
from recipec.compiler.pages.document import Block, Document, Plot
from recipec.compiler.render import FOLDER

if TYPE_CHECKING:
    from jinja2 import Environment

COLORS = ("#2f6fb0", "#1c8478", "#8a62bd", "#b05f0a", "#c04a84", "#7d7320", "#6d7480", "#c2453c")
"""Colors of curves, in this order. Each is visible on light and dark pages, and readable under white text."""
GRAY, INK = COLORS[6], "#7b8089"
"""Colors of background curves, and of lines and text; the style sheet gives the latter the page's color."""
SAID = "%{customdata}<extra></extra>"
SCRIPT = r"<script[^>]*>(.*?)</script>"
DIGITS = 6
"""Significant digits of plotted values; more would change less than a pixel."""


@functools.cache
def environment() -> Environment:
    """Create the Jinja environment. Unlike the artifacts', it escapes: names and settings are user input."""
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
    """Check that plotly is installed, without importing it.

    Args:
        what: the command that draws with it.
        extra: the extra of recipec that installs it.

    Raises:
        ArtifactError: when it is not installed.
    """
    if missing_packages(["plotly"]):
        raise ArtifactError(f"{what} draws with plotly, which is not installed", install(extra))


def plotly() -> str:
    """Return plotly's JavaScript."""
    from plotly.offline import get_plotlyjs

    script: str = get_plotlyjs()
    return script.replace("</script", "<\\/script")


def write(document: Document, extra: str = "plan") -> str:
    """Write the page's HTML. Its content security policy allows only plotly's script and the calls to it.

    Args:
        extra: the extra of recipec that installs plotly, which a document without plots does not need.

    Raises:
        ArtifactError: when plotly is needed and not installed.
    """
    drawings = [plot for section in document.sections for plot in _plots(section.blocks)]
    if drawings:
        require_plotly(document.command[0], extra)
    library, template = plotly() if drawings else "", environment().get_template
    plots = {plot.key: drawn(plot) for plot in drawings}
    body = template("pages/body.html.j2").render(page=document, plots=plots)
    # Only the plots' scripts: a script that entered the body in another way stays forbidden.
    scripts = [
        *([library] if library else []),
        *(script for plot in plots.values() for script in re.findall(SCRIPT, plot, re.DOTALL)),
    ]
    return template("pages/page.html.j2").render(
        page=document,
        body=body,
        library=library,
        style=template("pages/page.css.j2").render(),
        hashes=[script_hash(script) for script in scripts],
    )


def _plots(blocks: Sequence[Block]) -> Iterator[Plot]:
    for block in blocks:
        if isinstance(block, Plot):
            yield block
            yield from _plots(block.after)


def drawn(plot: Plot) -> str:
    """Return a plot's element and the call that draws it."""
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
        **plot.layout,
    }
    written: str = to_html(
        escaped({"data": list(plot.data), "layout": layout}),
        config={"displaylogo": False, "displayModeBar": False},
        include_plotlyjs=False,
        full_html=False,
        default_height=f"{plot.height}px",
        div_id=f"plot-{plot.key}",
        validate=False,
    )
    return written


def script_hash(script: str) -> str:
    """Return a script's hash in the form of a content security policy, which forbids all other scripts."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def scatter(
    name: str, x: Sequence[Any], y: Sequence[Any], color: str, mode: str = "lines", **more: Any
) -> dict[str, Any]:
    """Return a curve or points; `more` holds further settings of plotly."""
    line = {"color": color, "dash": more.pop("dash", "solid"), "width": more.pop("width", 2)}
    marker = {
        "color": color,
        "symbol": more.pop("symbol", "circle"),
        "size": more.pop("size", 7),
        "opacity": 1,
    }
    curve = {"type": "scatter", "name": name, "x": x, "y": y, "mode": mode, "line": line, "marker": marker}
    return {**curve, **_said(more)}


def bar(name: str, x: Sequence[Any], y: Sequence[Any], color: str, **more: Any) -> dict[str, Any]:
    """Return bars; `more` holds further settings of plotly."""
    return {"type": "bar", "name": name, "x": x, "y": y, "marker": {"color": color}, **_said(more)}


def _said(more: dict[str, Any]) -> dict[str, Any]:
    """Turn `said`, a text for each point, into plotly's settings for a text at the pointer."""
    texts = more.pop("said", None)
    return {**more, **({"customdata": texts, "hovertemplate": SAID} if texts is not None else {})}


def axis(title: str, **more: Any) -> dict[str, Any]:
    return {"title": {"text": title}, **more}


def rule(x: float, words: str, line: int = 0, color: str = INK) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a vertical line as a shape, and an annotation with the text above it, on its own row."""
    shape = {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": {"color": color}}
    place = {"x": x, "y": 1, "yref": "paper", "yshift": 2 + 16 * line, "xanchor": "right"}
    place["yanchor"] = "bottom"
    return shape, {**place, "text": words, "showarrow": False}


def escaped(value: Any) -> Any:
    """Prepare a figure for plotly: escape its texts, and round numbers to the digits that are visible."""
    if isinstance(value, str):
        return html.escape(value, quote=False)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    if isinstance(value, Mapping):
        return {key: item if key == "hovertemplate" else escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return value
