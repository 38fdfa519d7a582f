"""What a plot is made of, before a browser draws it: curves by run, marks, and the table behind it."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

DIGITS = 6
"""Significant digits of what is drawn: a pixel is worth less."""


@dataclass(frozen=True)
class Table:
    """Rows of texts; the first column is of names, or of steps."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """One line of a plot.

    Attributes:
        name: in the legend and at the pointer.
        color: number of its colour, from 0.
        x: places by axis: "step", "tokens" and "hours" of a run, "x" alone of a sweep.
        y: values.
        style: "line", "faint" (what a mean is of), "dashed", "dotted", "points" (a line with marks at its
            points), "dashed-points", "stars" (marks without a line).
        labels: texts at the points, where there are any.
    """

    name: str
    color: int
    x: Mapping[str, Sequence[Any]]
    y: Sequence[float | None]
    style: str = "line"
    labels: Sequence[str] = ()


@dataclass(frozen=True)
class Mark:
    """A vertical line: where a run was resumed ("resumed"), or a number was none ("bad")."""

    x: Mapping[str, Any]
    text: str
    kind: str
    color: int = 0


@dataclass(frozen=True)
class Chart:
    """A plot.

    Attributes:
        key: of the plot within the page, for its element.
        title, what: its heading, and a sentence on what is seen.
        unit: at the vertical axis.
        across: at the horizontal axis, by axis.
        kind: "lines", or "bars" of the first curve.
        logarithmic: whether the vertical axis is; a page may offer both with `may_be_logarithmic`.
        linked: whether it shares its horizontal axis with the other linked plots.
        floor: whether the vertical axis starts at 0.
        top: where the vertical axis ends at first, None for where the curves do.
        categories: what the horizontal axis is made of, in order, where it is no axis of numbers.
        notes: sentences below it.
    """

    key: str
    title: str
    what: str
    unit: str
    across: Mapping[str, str]
    curves: Sequence[Curve]
    table: Table
    marks: Sequence[Mark] = ()
    kind: str = "lines"
    logarithmic: bool = False
    may_be_logarithmic: bool = False
    linked: bool = False
    floor: bool = False
    top: float | None = None
    categories: Sequence[str] = ()
    notes: Sequence[str] = field(default_factory=tuple)


def as_json(charts: Sequence[Chart]) -> str:
    """The charts for the page's script, safe within a script element.

    Texts are escaped once more than the page needs: Plotly takes them for markup.
    """
    value = {
        chart.key: {
            "title": chart.title,
            "unit": html.escape(chart.unit),
            "across": {key: html.escape(text) for key, text in chart.across.items()},
            "kind": chart.kind,
            "logarithmic": chart.logarithmic,
            "mayBeLogarithmic": chart.may_be_logarithmic,
            "linked": chart.linked,
            "floor": chart.floor,
            "top": chart.top,
            "categories": list(chart.categories),
            "curves": [_curve(curve) for curve in chart.curves],
            "marks": [
                {"x": dict(mark.x), "text": html.escape(mark.text), "kind": mark.kind, "color": mark.color}
                for mark in chart.marks
            ],
        }
        for chart in charts
    }
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _curve(curve: Curve) -> dict[str, Any]:
    return {
        "name": html.escape(curve.name),
        "color": curve.color,
        "x": {key: [_rounded(value) for value in values] for key, values in curve.x.items()},
        "y": [_rounded(value) for value in curve.y],
        "style": curve.style,
        "labels": [html.escape(label) for label in curve.labels],
    }


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
