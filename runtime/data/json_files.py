"""Read the rows of JSON files: a list of objects, or an object per line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from .places import BLOCK, DataPath, decompressed
from .text_files import BYTE_ORDER_MARK, Record, read_json_lines
from .values import Malformed, kind

JSON_FILE = "a .json file is one list of objects, or has one object a line"


def read_json(place: DataPath) -> Iterator[Record]:
    """Read one list of objects, or an object per line."""
    with decompressed(place) as stream:
        beginning = stream.peek(BLOCK).removeprefix(BYTE_ORDER_MARK).lstrip()
        if re.match(rb"\{\s*\n", beginning):
            raise UserError(f"{place.name} holds an object that is written over several lines", JSON_FILE)
        listed = beginning[:1] == b"["
        if listed:
            yield from _List(place.name, io.TextIOWrapper(stream, "utf-8-sig")).items()
    if not listed:
        yield from read_json_lines(place)


class _List:
    """Parse the items of a JSON list one after the other, so that the text is never in memory as a whole."""

    def __init__(self, name: str, text: io.TextIOWrapper) -> None:
        self._name = name
        self._text = text
        self._buffer = ""
        self._at = 0
        self._line = self._column = 1  # of the character up to which line breaks were counted
        self._counted = 0
        self._ended = False

    def items(self) -> Iterator[Record]:
        """Yield each item with the line in which it begins.

        Raises:
            UserError: a part of the list is not JSON.
        """
        self._next()
        self._at += 1  # the opening bracket
        if self._next() != "]":
            while True:
                self._next()
                origin = f"{self._name}:{self._here()}"
                item = self._item()
                yield origin, item if isinstance(item, dict) else Malformed(f"{kind(item)}, not an object")
                following = self._next()
                if following == "]":
                    break
                if following != ",":
                    raise self._broken("expected ',' or ']'" if following else "it ends within the list")
                self._at += 1
        self._at += 1
        if self._next():
            raise self._broken("there is more after the list")

    def _here(self) -> int:
        """Return the current line."""
        breaks = self._buffer.count("\n", self._counted, self._at)
        start = self._buffer.rfind("\n", 0, self._at) + 1 if breaks else self._counted
        self._column = self._at - start + (1 if breaks else self._column)
        self._line, self._counted = self._line + breaks, self._at
        return self._line

    def _read(self, size: int = BLOCK) -> bool:
        """Read the next block and drop the text before the current place; return whether there was more."""
        self._here()
        new = self._text.read(size)
        self._buffer = self._buffer[self._at :] + new
        self._at = self._counted = 0
        self._ended = not new
        return not self._ended

    def _next(self) -> str:
        """Move to the next character that is not white space, and return it; "" at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._buffer) or self._ended or not self._read():
                return self._buffer[self._at : self._at + 1]

    def _item(self) -> Any:
        """Parse the item that begins at the current place, and move past it."""
        decoder = json.JSONDecoder()
        while True:
            try:
                item, end = decoder.raw_decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                behind = error.pos - self._at
                # Double the text each time, so that parsing a long item takes time linear in its length.
                if not self._ended and self._read(max(BLOCK, len(self._buffer))):
                    continue
                self._at = min(self._at + behind, len(self._buffer))
                raise self._broken(error.msg) from error
            except RecursionError as error:
                raise self._broken("nested too deep") from error
            length = end - self._at
            if end == len(self._buffer) and not self._ended and self._read():
                continue  # a number may continue in the next block
            self._at += length
            return item

    def _broken(self, reason: str) -> UserError:
        line = self._here()
        return UserError(f"{self._name}:{line}: not JSON ({reason}, column {self._column})", JSON_FILE)
