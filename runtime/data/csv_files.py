"""Read the rows of CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from ..errors import UserError
from .places import DataPath, decompressed
from .text_files import Record
from .values import Malformed


def read_csv(place: DataPath) -> Iterator[Record]:
    """Read the rows below a header, every cell as text."""
    csv.field_size_limit(2**31 - 1)
    with (
        decompressed(place) as stream,
        io.TextIOWrapper(stream, "utf-8-sig", errors="surrogateescape", newline="") as text,
    ):
        # Without strict, an unclosed quote would silently swallow the rest of the file.
        reader = csv.reader(text, strict=True)
        header: list[str] | None = None
        line = 1
        try:
            for cells in reader:
                origin, line = f"{place.name}:{line}", reader.line_num + 1
                if not cells:
                    continue  # a blank line
                if header is None:
                    header = _header(place.name, cells)
                else:
                    yield origin, _row(header, cells)
        except csv.Error as error:
            raise UserError(
                f"{place.name}:{line}: not CSV ({error})",
                'put a cell with a comma, a quote or a line break in double quotes, and write " as ""',
            ) from error


def _header(name: str, cells: list[str]) -> list[str]:
    twice = next((cell for cell in cells if cells.count(cell) > 1), None)
    if twice is not None:
        raise UserError(f"{name} has two columns {twice!r}", "give each column a different name")
    return cells


def _row(header: list[str], cells: list[str]) -> dict[str, Any] | Malformed:
    if len(cells) != len(header):
        return Malformed(f"{len(cells)} cells, and the header names {len(header)}")
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii():
            try:
                cell.encode("utf-8")
            except UnicodeEncodeError:
                return Malformed(f"{name!r} is not UTF-8")
    return dict(zip(header, cells, strict=True))
