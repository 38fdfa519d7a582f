"""Change a value or add a key in a recipe's text, and leave every other character as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from recipec.spec.diagnostics import Span
from recipec.spec.tree import Node, plain
from recipec.spec.yaml_document import LINE_BREAK, read

Position = tuple[int, int]
"""Line and column, both 0-based, in characters."""


@dataclass(frozen=True)
class TextEdit:
    """A text that replaces a range of another text."""

    start: Position
    end: Position
    text: str

    def apply(self, text: str) -> str:
        """Return the changed text. Line breaks of the inserted text become those of the file."""
        starts = [0, *(match.end() for match in LINE_BREAK.finditer(text))]
        first_break = LINE_BREAK.search(text)
        inserted = self.text.replace("\n", first_break[0] if first_break else "\n")
        start, end = (starts[line] + column for line, column in (self.start, self.end))
        return text[:start] + inserted + text[end:]


def on_one_line(node: Node, lines: Sequence[str]) -> bool:
    """Return whether the text at a node's position is the whole value.

    Args:
        lines: of the file that holds the node.
    """
    span = node.place.span
    part = lines[span.line - 1][span.column - 1 : span.column - 1 + span.length]
    again = read(part, "").root
    return again is not None and bool(plain(again) == plain(node))


def replaced(value: Span, text: str) -> TextEdit:
    """Return the edit that replaces a value on one line; its quotes are part of it."""
    line, start = value.line - 1, value.column - 1
    return TextEdit((line, start), (line, start + value.length), text)


def added(section: Span, keys: Sequence[Span], line: str, lines: Sequence[str]) -> TextEdit:
    """Return the edit that adds a key below a section's first key if that takes one line, else above it.

    Args:
        section: position of the section's value.
        keys: positions of the section's keys, at least one unless the section is `{}`.
        line: the key and its value: "image: base:1".
        lines: of the file.
    """
    in_braces = lines[section.line - 1].startswith("{", section.column - 1)
    if not keys:
        after_brace = (section.line - 1, section.column)
        return TextEdit(after_brace, after_brace, line)
    first, *others = sorted(keys, key=lambda span: (span.line, span.column))
    if in_braces:
        text = f"{line}, "
    else:
        first = next((other for other in others[:1] if other.line == first.line + 1), first)
        text = f"{line}\n{' ' * (first.column - 1)}"
    at = (first.line - 1, first.column - 1)
    return TextEdit(at, at, text)
