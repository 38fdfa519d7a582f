"""Pages of plans, read as a browser reads them: their text, their marks, their pictures."""

from __future__ import annotations

from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any
from xml.etree import ElementTree

from recipec.compiler.plan.page.document import page
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
        words: everything that is shown, spaces made one.
        within: the text of scripts and styles by element.
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


def read(plan: Plan, *others: Any) -> Reader:
    return Reader(page(plan, *others))


def svg(markup: str) -> ElementTree.Element:
    """The first of a picture's widths, which is the wide one."""
    return ElementTree.fromstring(f"<div>{markup}</div>").findall(".//svg")[0]


def marked(picture: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [one for one in picture.iter() if kind in one.get("class", "").split()]


def number(element: ElementTree.Element, name: str) -> float:
    return float(element.get(name, "nan"))
