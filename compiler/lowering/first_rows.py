"""Read the first rows of a local data file, without the packages that training needs."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.references import ENDINGS, is_dataset
from recipec.compiler.wording import listing

LOOKED_AT = 200
"""The number of rows that are read."""

MOST = 8 << 20
"""The number of characters that are read of a line, or of a file that is one JSON list."""


def first_rows(file: Path) -> list[dict[str, Any]] | None:
    """Read at most LOOKED_AT rows; None for a format that this environment cannot read, or a data set's
    folder.

    Raises:
        OSError, EOFError, ValueError, RecursionError, csv.Error: the file cannot be read.
    """
    if is_dataset(file.name):
        if file.is_file():
            raise ValueError(f"its name ends in none of {listing(ENDINGS, 'or')}, which show its format")
        return None
    if not file.is_file():
        raise ValueError("it is not a regular file")
    rows = all_rows(file)
    return None if rows is None else list(islice(rows, LOOKED_AT))


def all_rows(file: Path, most: int = MOST) -> Iterator[dict[str, Any]] | None:
    """Read the rows of a file one after the other; None for a format that this environment cannot read.

    Args:
        most: the number of characters that are read of a line, or of a file that is one JSON list.

    Raises:
        OSError, EOFError, ValueError, RecursionError, csv.Error: while it is read, as for `first_rows`.
    """
    name = file.name.lower()
    kind = name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet" and find_spec("pyarrow"):
        return _parquet(file)
    return _text_rows(file, kind, most) if kind in ("jsonl", "json", "csv") else None


def _text_rows(file: Path, kind: str, most: int) -> Iterator[dict[str, Any]]:
    csv.field_size_limit(most)  # 131,072 characters of a cell by default
    with gzip.open(file) if file.name.lower().endswith(".gz") else file.open("rb") as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        yield from csv.DictReader(text) if kind == "csv" else _json_rows(text, kind, most)


def _json_rows(text: io.TextIOWrapper, kind: str, most: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file with one object per line, or with one list of objects.

    Raises:
        ValueError: a line is not an object, or the list is not valid JSON; the message has the position.
    """
    listed = kind == "json"
    for number, line in enumerate(iter(lambda: text.readline(most), ""), 1):
        if not line.strip():
            continue
        if listed and line.lstrip().startswith("["):
            whole = line + text.read(most)
            if len(whole) >= most:
                raise ValueError("it is one JSON list of more than 8 MB: write it as .jsonl")
            yield from (row for row in _value(whole, number) if isinstance(row, dict))
            return
        if len(line) == most:
            raise ValueError(f"line {number} has more than 8 MB")
        row, listed = _value(line, number), False
        if not isinstance(row, dict):
            raise ValueError(f"line {number} is not a JSON object")
        yield row


def _value(text: str, number: int) -> Any:
    """Parse a JSON text that begins at line `number` of its file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        place = f"line {number + error.lineno - 1}, column {error.colno}"
        raise ValueError(f"it is not JSON at {place}: {error.msg}") from None


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        for batch in ParquetFile(file).iter_batches(LOOKED_AT):
            yield from batch.to_pylist()
    except ArrowInvalid as error:
        raise ValueError(str(error)) from None
