"""The type of pages that are made from the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: relative to docs/, although no file exists there.
        title: in the navigation.
        text: Markdown.
    """

    path: str
    title: str
    text: str


def cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
