"""What the readers of both grammars share: the text by lines, the places found, and what is refused."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from spec.diagnostics import Diagnostic, Span
from spec.document import MAX_DEPTH, Refused
from spec.secrets import Concealer, kind

MOST_VALUES = 50_000
"""Values of a file, those that an alias stands for counted each time."""

LONGEST = 1023
"""Bits of a whole number that is read as one: a float holds no longer ones."""

conceal = Concealer(None)
"""Replaces what looks like a token by stars, in a text that is shown."""


@dataclass
class Tree:
    """A text that is being read.

    Attributes:
        file: the name to show.
        spans, keys: the places of values and of their keys, by path.
        diagnostics: warnings; an error is raised as Refused.
        secrets: of the values that look like tokens, by path, what they look like: "an API key".
        count: values so far.
    """

    text: str
    file: str
    spans: dict[str, Span] = field(default_factory=dict)
    keys: dict[str, Span] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.lines = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", conceal(self.text))

    def span(self, line: int, column: int, length: int = 1) -> Span:
        """A place, from line and column counted from 0."""
        text = self.lines[line] if line < len(self.lines) else ""
        return Span(self.file, line + 1, column + 1, text, length)

    def refused(self, code: str, message: str, help: str | None, span: Span) -> Refused:
        """What to raise when nothing can be read after this."""
        return Refused(Diagnostic(code, message, help=help, span=span))

    def enter(self, depth: int, span: Span) -> None:
        """Counts a value.

        Raises:
            Refused: it lies too deep, or there are too many.
        """
        self.count += 1
        if depth > MAX_DEPTH:
            message = f"lists and mappings lie more than {MAX_DEPTH} deep"
            raise self.refused("E0015", message, "is it a config?", span)
        if self.count > MOST_VALUES:
            message = f"the file holds more than {MOST_VALUES:,} values, what aliases repeat counted"
            raise self.refused(
                "E1109", message, "is it a config? write out what aliases of aliases stand for", span
            )

    def value(self, text: str, path: str) -> str:
        """A text that stands at a path, with stars in place of what looks like a token."""
        if found := kind(text):
            self.secrets[path] = found
        return conceal(text)

    def whole(self, number: int, text: str) -> int | str:
        """A whole number; its text where it is larger than any float."""
        return number if number.bit_length() <= LONGEST else text

    def repeated(self, key: str, path: str, span: Span) -> None:
        """A key that stands in its section a second time."""
        first = self.keys[path].line
        message = f"`{key}` is given twice: it stands on line {first} already, and the last one counts"
        self.diagnostics.append(Diagnostic("W1115", message, path, "remove one of the two", span))

    def forget(self, path: str) -> None:
        """Takes away the places below a path, of a value that another one replaces."""
        for places in (self.spans, self.keys, self.secrets):
            for known in [
                name for name in places if name == path or name.startswith((f"{path}.", f"{path}["))
            ]:
                places.pop(known)
