"""The type of pages that are made from the code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Page:
    """A page of the site.

    Attributes:
        path: relative to docs/.
        title: in the navigation.
        text: Markdown.
    """

    path: str
    title: str
    text: str


def heading(marks: str, text: str, anchor: str) -> str:
    """Return a heading that a link can name, on the site and where the file is read as it is."""
    return f'<a id="{anchor}"></a>\n\n{marks} {text}'


def cell(text: str) -> str:
    """Escape a text for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")
