"""Read the rows of JSON Lines files; json_files.py and csv_files.py have the other text formats."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from .places import DataPath, decompressed, kind_of
from .values import Malformed, json_object

Record = tuple[str, dict[str, Any] | Malformed]
"""A row's place (FILE:LINE, or FILE#ROW from 0), and the row or why it is not valid."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_json_lines(place: DataPath) -> Iterator[Record]:
    """Read an object per line; blank lines are skipped."""
    return (found for found, _ in marked_lines(place))


def marked_lines(place: DataPath, lines: int = 0, offset: int = 0) -> Iterator[tuple[Record, list[int]]]:
    """Read as `read_json_lines`, after this many lines and bytes; each row comes with the new counts.

    A compressed file is read from its beginning, and the lines are skipped.
    """
    with decompressed(place) as stream:
        if kind_of(place.name) != place.name.lower().rpartition(".")[2]:
            for _ in islice(stream, lines):
                pass
        elif offset:
            stream.seek(offset)
        for number, line in enumerate(stream, lines + 1):
            offset += len(line)
            if number == 1:
                line = line.removeprefix(BYTE_ORDER_MARK)
            if line.strip():
                yield record(f"{place.name}:{number}", line), [number, offset]


def record(origin: str, content: bytes) -> Record:
    """Return a row that is written as JSON."""
    try:
        return origin, json_object(content)
    except Malformed as error:
        return origin, error
