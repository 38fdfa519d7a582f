"""Read the rows of Parquet, Arrow and ArrayRecord files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ..errors import UserError
from .places import DataPath
from .text_files import Record, record
from .values import ColumnRow, json_objects

BATCH = 1000
"""Number of rows that are converted to Python objects at once."""


def read_parquet(place: DataPath, first: int = 0) -> Iterator[Record]:
    """Read a Parquet file from row `first` on, a batch at a time, skipping earlier row groups."""
    import pyarrow.parquet as pq

    with _opened(place) as source, pq.ParquetFile(source) as file:
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        group = before = 0
        while group < len(sizes) and before + sizes[group] <= first:
            before += sizes[group]
            group += 1
        groups = range(group, len(sizes))
        yield from _numbered(place.name, file.iter_batches(BATCH, groups), first, before)


def parquet_rows(place: DataPath) -> int:
    """Return the number of rows, from the file's footer."""
    import pyarrow.parquet as pq

    with _opened(place) as source, pq.ParquetFile(source) as file:
        return int(file.metadata.num_rows)


def read_arrow(place: DataPath, first: int = 0) -> Iterator[Record]:
    """Read either form of Arrow's IPC format: the file, or the stream, which `datasets` writes."""
    import pyarrow as pa

    with _opened(place) as source:
        magic = source.read(6)
        source.seek(0)
        if magic == b"ARROW1":
            file = pa.ipc.open_file(source)
            batches = (file.get_batch(i) for i in range(file.num_record_batches))
            yield from _numbered(place.name, batches, first)
        else:
            yield from _numbered(place.name, pa.ipc.open_stream(source), first)


def rows_of(table: Any) -> Iterator[dict[str, Any]]:
    """Return the rows of an Arrow table or batch as Python objects: a `ColumnRow` each."""
    decode = _decoder(table.schema)
    for start in range(0, table.num_rows, BATCH):
        for row in table.slice(start, BATCH).to_pylist():
            yield ColumnRow(_decoded(row, decode(row)) if decode else row)


def _decoded(stored: Any, value: Any) -> Any:
    """Return a decoded value with a `JsonObject` for each object that is stored as JSON text."""
    if isinstance(stored, dict) and isinstance(value, dict):
        return {key: _decoded(stored.get(key), item) for key, item in value.items()}
    if isinstance(stored, list) and isinstance(value, list):
        return [_decoded(*pair) for pair in zip(stored, value, strict=True)]
    return json_objects(value)


def read_array_record(place: DataPath, first: int = 0) -> Iterator[Record]:
    """Read records that are JSON."""
    if place.local:
        yield from _array_record(place.name, place.path, first)
        return
    with tempfile.TemporaryDirectory() as folder:  # the library opens only local files
        copy = str(Path(folder) / "records")
        place.system.get_file(place.path, copy)
        yield from _array_record(place.name, copy, first)


def _opened(place: DataPath) -> Any:
    """Open a file for pyarrow, mapped into memory if it is local."""
    import pyarrow as pa

    return pa.memory_map(place.path) if place.local else pa.PythonFile(place.open(), "r")


def _numbered(name: str, batches: Iterable[Any], first: int = 0, number: int = 0) -> Iterator[Record]:
    """Yield the rows from row `first` on; the first batch begins with row `number`."""
    for batch in batches:
        skipped = min(max(first - number, 0), batch.num_rows)
        number += skipped
        for row in rows_of(batch.slice(skipped) if skipped else batch):
            yield f"{name}#{number}", row
            number += 1


def _decoder(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return a decoder of JSON text in columns of `datasets`' type Json; None without such columns."""
    if "arrow.json" not in str(schema):
        return None
    from datasets import Features

    features = Features.from_arrow_schema(schema)
    decode: Callable[[dict[str, Any]], dict[str, Any]] = features.decode_example
    return decode


def _array_record(name: str, path: str, first: int) -> Iterator[Record]:
    from array_record.python.array_record_module import ArrayRecordReader

    reader = ArrayRecordReader(path)
    try:
        if not reader.ok():
            raise UserError(f"{name} is not an ArrayRecord file, or is damaged", "write it again")
        total = reader.num_records()
        for start in range(first, total, BATCH):
            for number, content in enumerate(reader.read(start, min(start + BATCH, total)), start):
                yield record(f"{name}#{number}", content)
    finally:
        reader.close()


READERS = {"parquet": read_parquet, "arrow": read_arrow, "array_record": read_array_record}
"""Readers by the kind of a file."""
