"""A document's text, and places in it: as the protocol counts them, and as YAML does."""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property

Position = tuple[int, int]
"""Line and character, both from 0; a character is a unit of the encoding agreed on with the editor."""

_BREAK = re.compile(r"\r\n|\n|\r")
_YAML_BREAK = re.compile(r"\r\n|[\n\r]")


class Text:
    """A text and its lines.

    Args:
        source: the text.
        encoding: "utf-8", "utf-16" or "utf-32": what the editor counts within a line.
    """

    def __init__(self, source: str, encoding: str = "utf-16") -> None:
        self.source = source
        self.encoding = encoding

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(match.end() for match in _BREAK.finditer(self.source))]

    @cached_property
    def _yaml_starts(self) -> list[int]:
        return [0, *(match.end() for match in _YAML_BREAK.finditer(self.source))]

    def offset(self, position: Position) -> int:
        """Index into the text; a position beyond a line or the text is at its end."""
        line, character = position
        if line >= len(self._starts):
            return len(self.source)
        start, end = self._starts[line], self.line_end(line)
        at = start
        while at < end and character > 0:
            character -= self._units(self.source[at])
            at += character >= 0
        return at

    def position(self, offset: int) -> Position:
        """The place of an index into the text."""
        offset = max(0, min(offset, len(self.source)))
        line = bisect_right(self._starts, offset) - 1
        return line, self._units(self.source[self._starts[line] : offset])

    def line_end(self, line: int) -> int:
        """Index of the end of a line, before its break."""
        found = _BREAK.search(self.source, self._starts[line])
        return found.start() if found else len(self.source)

    def yaml_offset(self, line: int, column: int) -> int:
        """Index of a diagnostic's place: line and column from 0, in characters, lines as YAML breaks them."""
        if line >= len(self._yaml_starts):
            return len(self.source)
        found = _YAML_BREAK.search(self.source, self._yaml_starts[line])
        return min(self._yaml_starts[line] + column, found.start() if found else len(self.source))

    def _units(self, text: str) -> int:
        if text.isascii() or self.encoding == "utf-32":
            return len(text)
        if self.encoding == "utf-8":
            return len(text.encode("utf-8", "surrogatepass"))
        return len(text) + sum(character > "\uffff" for character in text)
