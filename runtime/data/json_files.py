"""Read the rows of JSON files: a list of objects, or an object per line."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator

from ..errors import UserError
from .places import BLOCK, DataPath, decompressed
from .text_files import BYTE_ORDER_MARK, Record, read_json_lines
from .values import Malformed, kind

JSON_FILE = "a .json file is one list of objects, or has one object a line"
SPACE = re.compile(r"[ \t\r\n]*")


def read_json(place: DataPath) -> Iterator[Record]:
    """Read one list of objects, or an object per line."""
    with decompressed(place) as stream:
        beginning = stream.peek(BLOCK).removeprefix(BYTE_ORDER_MARK).lstrip()
        if re.match(rb"\{\s*\n", beginning):
            raise UserError(f"{place.name} holds an object that is written over several lines", JSON_FILE)
        listed = beginning[:1] == b"["
        if listed:
            yield from _items(place.name, io.TextIOWrapper(stream, "utf-8-sig").read())
    if not listed:
        yield from read_json_lines(place)


def _items(name: str, text: str) -> Iterator[Record]:
    """Yield the items of a JSON list one after the other, each with the line in which it begins.

    Raises:
        UserError: a part of the list is not JSON.
    """

    def after_space(place: int) -> int:
        found = SPACE.match(text, place)
        return found.end() if found else place

    def broken(reason: str, place: int) -> UserError:
        line, column = text.count("\n", 0, place) + 1, place - text.rfind("\n", 0, place)
        return UserError(f"{name}:{line}: not JSON ({reason}, column {column})", JSON_FILE)

    decoder = json.JSONDecoder()
    line, counted = 1, 0
    following, at = ",", after_space(text.index("[") + 1)
    if text[at : at + 1] == "]":
        following, at = "]", after_space(at + 1)
    while following == ",":
        line, counted = line + text.count("\n", counted, at), at
        try:
            item, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            raise broken(error.msg, error.pos) from error
        except RecursionError as error:
            raise broken("nested too deep", at) from error
        yield f"{name}:{line}", item if isinstance(item, dict) else Malformed(f"{kind(item)}, not an object")
        at = after_space(end)
        following = text[at : at + 1]
        if following not in (",", "]"):
            raise broken("expected ',' or ']'" if following else "it ends within the list", at)
        at = after_space(at + 1)
    if at < len(text):
        raise broken("there is more after the list", at)
