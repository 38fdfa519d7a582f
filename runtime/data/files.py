"""Read the rows of a file of any format and location."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..settings import Source
from .places import ENDINGS, HUB, DataPath, explained, kind_of, place_of
from .text_files import Record, read_json_lines


def reader_of(kind: str) -> Callable[[DataPath], Iterator[Record]]:
    """Return the reader of a kind of files."""
    if kind == "jsonl":
        return read_json_lines
    if kind == "json":
        from .json_files import read_json

        return read_json
    if kind == "csv":
        from .csv_files import read_csv

        return read_csv
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
            yield from (reader or reader_of(kind))(place)
    except UserError:
        raise
    except Exception as error:  # Libraries of file systems and formats raise any exception.
        raise explained(place.name, error, place) from error


def located(source: Source, data_dir: Path) -> tuple[DataPath | None, bool]:
    """Return a source's place, and whether it is a folder; None for a data set of the hub.

    Raises:
        UserError: it is missing, or of an unknown kind.
    """
    path = source.path
    if path.startswith(HUB) and kind_of(path) is None:
        return None, False
    place = place_of(path, data_dir)
    try:
        # Checking whether a web address is a folder would download it.
        is_folder = not path.startswith(("http://", "https://")) and place.system.isdir(place.path)
        missing = not is_folder and kind_of(path) is None and not place.system.exists(place.path)
    except Exception as error:
        raise explained(path, error, place) from error
    if missing:
        raise explained(path, FileNotFoundError(), place)
    for key, value in (("config", source.config), ("split", None if is_folder else source.split)):
        if value is not None:
            raise UserError(
                f"{path} is not a data set of the Hugging Face hub, and has no {key} {value!r}",
                f"remove data's {key}, or name the data set as {HUB}OWNER/NAME",
            )
    if not is_folder and kind_of(path) is None:
        raise UserError(f"the ending of {path} does not show its format", f"known ones are {ENDINGS}")
    return place, is_folder
