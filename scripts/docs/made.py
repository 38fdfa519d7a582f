"""A page that is made from the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: in docs/, as if it stood there.
        title: in the navigation.
        text: Markdown.
    """

    path: str
    title: str
    text: str


def cell(text: str) -> str:
    """A text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
