"""Count the rows of files."""

from __future__ import annotations

from itertools import islice

from .files import read_file
from .places import DataPath, explained, kind_of


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
