"""The code blocks of a Markdown page."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

from tests.docs.shell import ROOT

TOP = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages outside of the site."""
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in TOP)]
"""Pages written by hand. Those in docs/language/ come from the schema, whose examples tests/spec checks."""

_TITLE = re.compile(r'title="([^"]*)"')
_COMMENT = re.compile(r"<!--\s*(.*?)\s*-->\s*$", re.S)


@dataclass(frozen=True)
class Block:
    """A code block of a page.

    Attributes:
        page: its file.
        line: the line of its first fence, counted from 1.
        language: the first word of the fence, or "".
        title: the file that it is, or shows, from the fence, or "".
        remark: the HTML comment right above it, or "". `PATH` says that the block is that file of the
            repository, `from PATH` that it is a part of it, `slow` that its commands take too long for the
            tests, and `wrong` that a recipe does not compile. tests.docs.running explains `parsed: REASON`
            and `each`.
        text: the text with its last newline.
    """

    page: Path
    line: int
    language: str
    title: str
    remark: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.name}:{self.line}"


@functools.cache
def blocks(page: Path) -> tuple[Block, ...]:
    """Return every block of a page in order, including indented ones."""
    return tuple(_blocks(page))


def _blocks(page: Path) -> Iterator[Block]:
    tokens = MarkdownIt("commonmark").parse(page.read_text(encoding="utf-8"))
    for number, token in enumerate(tokens):
        if token.type not in ("fence", "code_block"):
            continue
        above = tokens[number - 1] if number else None
        language, _, rest = token.info.strip().partition(" ")
        title = _TITLE.search(rest)
        remark = _COMMENT.search(above.content) if above is not None and above.type == "html_block" else None
        yield Block(
            page,
            (token.map or [0])[0] + 1,
            language,
            title[1] if title else "",
            remark[1] if remark else "",
            token.content,
        )


@functools.cache
def inline(page: Path) -> tuple[tuple[int, str], ...]:
    """Return every `text in backticks` of a page, with its line."""
    return tuple(_inline(page))


def _inline(page: Path) -> Iterator[tuple[int, str]]:
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8")):
        for child in token.children or ():
            if child.type == "code_inline":
                yield _line(token), child.content


def _line(token: Token) -> int:
    return (token.map or [0])[0] + 1
