"""Read the rows of a file of any format and location."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ..errors import UserError
from .places import ENDINGS, DataPath, explained, kind_of
from .text_files import Record, read_csv, read_json, read_json_lines

TEXTS: dict[str, Callable[[DataPath], Iterator[Record]]] = {
    "jsonl": read_json_lines,
    "json": read_json,
    "csv": read_csv,
}
"""The readers of text formats; column_files has the readers of the others."""


def _reader(kind: str) -> Callable[[DataPath], Iterator[Record]]:
    if kind in TEXTS:
        return TEXTS[kind]
    from .column_files import READERS

    return READERS[kind]


def read_file(place: DataPath, reader: Callable[[DataPath], Iterator[Any]] | None = None) -> Iterator[Any]:
    """Stream the rows of a file in order; an empty file has none.

    Args:
        reader: replaces the default reader of the file's kind.

    Raises:
        UserError: it is missing, cannot be read, is broken, or its ending is not known.
    """
    kind = kind_of(place.name)
    if kind is None:
        raise UserError(f"the ending of {place.name} does not show its format", f"known ones are {ENDINGS}")
    place.check()
    try:
        if not place.system.exists(place.path):
            raise FileNotFoundError(place.path)
        if place.system.size(place.path) != 0:
            yield from (reader or _reader(kind))(place)
    except UserError:
        raise
    except Exception as error:  # Libraries of file systems and formats raise any exception.
        raise explained(place.name, error, place) from error


def count_rows(place: DataPath, most: int | None = None) -> int:
    """Count a file's rows, up to `most`. Parquet states the count in its footer; other files are read.

    Raises:
        UserError: as for `read_file`.
    """
    if kind_of(place.name) != "parquet":
        return sum(1 for _ in islice(read_file(place), most))
    from .column_files import parquet_rows

    place.check()
    try:
        return parquet_rows(place)
    except Exception as error:
        raise explained(place.name, error, place) from error
