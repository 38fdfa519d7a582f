"""A reader of HTML pages: their text, and what Plotly draws."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

from recipec.compiler.pages import html
from recipec.compiler.plan.plan_document import document
from recipec.compiler.plan.results import Plan
from tests.plan import plans

VOID = {"meta", "br"}
PLANS: dict[str, Callable[[], Plan]] = {
    "flagship": plans.flagship,
    "too large": plans.too_large,
    "refused": plans.refused,
    "unpriced": plans.unpriced,
    "unknown length": plans.unknown_length,
    "two slices": plans.sliced,
    "one axis": plans.one_axis,
}


class Reader(HTMLParser):
    """A page's elements and text.

    Attributes:
        elements: names with their attributes, in order.
        words: the visible text, with single spaces.
        within: the text of scripts and styles by element.
        figures: what Plotly draws, by its key: "data" and "layout".
    """

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.shown: list[str] = []
        self.within: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(text)
        self.close()
        assert self.open == []
        self.words = " ".join("".join(self.shown).split())
        self.figures = dict(figure(one) for one in self.within["script"] if "Plotly.newPlot(" in one)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.within:
            self.within[self.open[-1]].append(data)
        else:
            self.shown.append(f" {data}")

    def attributes(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.elements if name in attributes]

    def named(self, name: str) -> list[dict[str, str]]:
        return [attributes for tag, attributes in self.elements if tag == name]


def figure(script: str) -> tuple[str, dict[str, Any]]:
    """Return the key, data and layout of a plot from the call that draws it."""
    found = re.search(r'Plotly\.newPlot\(\s*"plot-([^"]+)",\s*', script)
    assert found is not None
    data, end = json.JSONDecoder().raw_decode(script, found.end())
    start = re.compile(r",\s*").match(script, end)
    assert start is not None
    return found[1], {"data": data, "layout": json.JSONDecoder().raw_decode(script, start.end())[0]}


def page(plan: Plan, *others: Any) -> str:
    return html.write(document(plan, *others), "plan")


def read(plan: Plan, *others: Any) -> Reader:
    return Reader(page(plan, *others))
