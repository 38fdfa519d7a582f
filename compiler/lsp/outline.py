"""A recipe's outline: where its keys, values and half-typed words stand in a text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from spec.core_schema import Value, scalar
from spec.paths import Part

Path = tuple[Part, ...]
Extent = tuple[int, int]
"""Start and end, as indices into the text."""


@dataclass
class Entry:
    """A key with its value, or an item of a list.

    Attributes:
        path: of the value.
        key: the key's extent, None for an item.
        value: the value's extent; empty where none is given. Of a section in lines it ends with its last one.
        open: whether the value is keys or items rather than a single value.
        flow: whether it stands within brackets.
    """

    path: Path
    key: Extent | None
    value: Extent
    open: bool = False
    flow: bool = False


@dataclass(frozen=True)
class Word:
    """A text that is neither a key with its colon nor a value of one: half a key, or a value on its own line.

    Attributes:
        path: of the section or value that it stands in.
    """

    path: Path
    extent: Extent
    flow: bool = False


@dataclass
class Outline:
    """What was found in a text, in its order."""

    source: str
    entries: list[Entry] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)

    def get(self, *path: Part) -> Value:
        """The single value at a path; None where there is none."""
        for entry in self.entries:
            if entry.path == path and not entry.open:
                return value_of(self.source[slice(*entry.value)])
        return None

    def below(self, path: Path) -> Iterator[Entry]:
        """The entries of a section or list."""
        return (entry for entry in self.entries if entry.path[:-1] == path and len(entry.path) > len(path))

    def at(self, offset: int) -> tuple[Entry, bool] | None:
        """The entry whose key or single value is at a place, and whether it is the key; None elsewhere."""
        found = None
        for entry in self.entries:
            if entry.key and entry.key[0] <= offset <= entry.key[1]:
                return entry, True
            if entry.value[0] <= offset <= entry.value[1] and (entry.flow or not entry.open):
                found = entry, False
        return found


def value_of(text: str) -> Value:
    """A single value as YAML reads it."""
    if text[:1] == '"':
        try:
            return str(json.loads(text, strict=False))
        except ValueError:
            return text.strip('"')
    if text[:1] == "'":
        return text.strip("'").replace("''", "'")
    return scalar(text)
