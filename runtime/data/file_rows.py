"""Read the rows of a data file, of any kind and at any address that fsspec opens.

A file's ending gives its kind. Each kind has a reader, which yields the rows in order.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from ..addresses import is_address
from ..errors import UserError, first_line
from ..stores import unavailable
from ..untrusted import check_ends
from .row_values import ColumnRow, Malformed, json_object, json_objects, kind

HUB = "hf://"

BLOCK = 1 << 20
"""Number of bytes that are read at once."""

TOLD = ("size", "ETag", "etag", "md5Hash", "crc32c", "generation", "blob_id")
"""The entries of a file system that identify a file's contents; the first alone does not suffice."""

ENDINGS = ".jsonl, .json or .csv (each also with .gz or .zst), .parquet, .arrow or .array_record"

_ENDING = re.compile(
    r"\.(?:(?P<text>jsonl|json|csv)(?:\.(?:gz|zst))?"
    r"|(?P<columns>parquet|arrow)"
    r"|array_?record(?:-\d+-of-\d+)?)$",  # TensorFlow Datasets numbers its shards after the ending
    re.IGNORECASE,
)


@dataclass(frozen=True)
class DataPath:
    """A file or folder on a file system.

    Attributes:
        name: the recipe's name for it; a file in a folder is FOLDER/PATH.
        system: fsspec's file system.
        path: its path on that system.
    """

    name: str
    system: Any
    path: str

    @property
    def local(self) -> bool:
        """Whether other libraries can open `path` directly."""
        protocol = self.system.protocol
        return "file" in ((protocol,) if isinstance(protocol, str) else protocol)

    def check(self) -> None:
        """Check that reading it ends.

        Raises:
            UserError: it is a local pipe, device or the like.
        """
        if self.local:
            check_ends(self.path, self.name)

    def open(self) -> Any:
        """Open the file's bytes as they are stored."""
        return self.system.open(self.path, "rb")


def place_of(name: str, data_dir: Path) -> DataPath:
    """Return a source's place. Nothing is opened.

    Args:
        name: a path (relative to `data_dir` if it is relative) or an address.

    Raises:
        UserError: no file system is known for the address, or its package is not installed.
    """
    from fsspec.core import url_to_fs

    try:
        system, path = url_to_fs(name if "://" in name else str(data_dir / Path(name).expanduser()))
    except Exception as error:
        raise explained(name, error) from error
    return DataPath(name, system, path)


def kind_of(name: str) -> str | None:
    """Return a file's kind by its extension: "jsonl", "csv", "array_record" and so on; None if unknown."""
    match = _ENDING.search(name)
    if match is None:
        return None
    return str(match["text"] or match["columns"] or "array_record").lower()


@contextmanager
def decompressed(place: DataPath) -> Iterator[io.BufferedReader]:
    """Return a file's bytes, decompressed as its extension says."""
    with place.open() as raw:
        name = place.name.lower()
        if name.endswith(".gz"):
            raw = gzip.GzipFile(fileobj=raw)
        elif name.endswith(".zst"):
            import pyarrow as pa

            raw = pa.CompressedInputStream(raw, "zstd")
        with io.BufferedReader(raw, BLOCK) as stream:
            yield stream


def explained(name: str, error: Exception, place: DataPath | None = None) -> UserError:
    """Return a user's explanation of an exception from a file system's or a format's library."""
    reason = first_line(error)
    if isinstance(error, FileNotFoundError):
        where = place.path if place is not None and place.local else name
        return UserError(
            f"there is no data file {where}",
            "data.train and data.eval are relative to the artifact's folder, or to --data-dir",
        )
    if is_address(name) and (unavailability := unavailable(name, error)):
        return unavailability
    which = "" if isinstance(error, (OSError, ValueError, EOFError)) else f"{type(error).__name__}: "
    help = "check that it is complete, and that its ending names its format" if kind_of(name) else None
    if isinstance(error, ImportError) and error.name:
        help = f"pip install {error.name.partition('.')[0]}"
    return UserError(f"{name} cannot be read: {which}{reason}", help)


def address_of(path: str) -> tuple[str, str | None]:
    """Return OWNER/NAME and the revision (None for the newest) of a data set of the hub."""
    name, _, revision = path.removeprefix(HUB).removeprefix("datasets/").strip("/").partition("@")
    return name, revision or None


Record = tuple[str, dict[str, Any] | Malformed]
"""A row's place (FILE:LINE, or FILE#ROW from 0), and the row or why it is not valid."""

Mark = Sequence[int]
"""How much of a shard was read: its rows, or for JSON lines its lines and bytes; empty at its beginning."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_json_lines(place: DataPath, first: int = 0) -> Iterator[Record]:
    """Read an object per line, from row `first` on; blank lines are skipped."""
    return islice((row for row, _ in marked_lines(place)), first, None)


def marked_lines(place: DataPath, lines: int = 0, offset: int = 0) -> Iterator[tuple[Record, Mark]]:
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


JSON_FILE = "a .json file is one list of objects, or has one object a line"

SPACE = re.compile(r"[ \t\r\n]*")


def read_json(place: DataPath, first: int = 0) -> Iterator[Record]:
    """Read one list of objects, or an object per line, from row `first` on."""
    return islice(_json_rows(place), first, None)


def _json_rows(place: DataPath) -> Iterator[Record]:
    with decompressed(place) as stream:
        beginning = stream.peek(BLOCK).removeprefix(BYTE_ORDER_MARK).lstrip()
        if re.match(rb"\{\s*\n", beginning):
            raise UserError(f"{place.name} holds an object that is written over several lines", JSON_FILE)
        listed = beginning[:1] == b"["
        if listed:
            yield from _json_items(place.name, io.TextIOWrapper(stream, "utf-8-sig").read())
    if not listed:
        yield from read_json_lines(place)


def _json_items(name: str, text: str) -> Iterator[Record]:
    """Yield the items of a JSON list one after the other, each with the line in which it begins.

    Raises:
        UserError: a part of the list is not JSON.
    """

    def after_space(place: int) -> int:
        space = SPACE.match(text, place)
        return space.end() if space else place

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


def read_csv(place: DataPath, first: int = 0) -> Iterator[Record]:
    """Read the rows below a header, from row `first` on, every cell as text."""
    return islice(_csv_rows(place), first, None)


def _csv_rows(place: DataPath) -> Iterator[Record]:
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
                    header = _csv_header(place.name, cells)
                else:
                    yield origin, _csv_row(header, cells)
        except csv.Error as error:
            raise UserError(
                f"{place.name}:{line}: not CSV ({error})",
                'put a cell with a comma, a quote or a line break in double quotes, and write " as ""',
            ) from error


def _csv_header(name: str, cells: list[str]) -> list[str]:
    twice = next((cell for cell in cells if cells.count(cell) > 1), None)
    if twice is not None:
        raise UserError(f"{name} has two columns {twice!r}", "give each column a different name")
    return cells


def _csv_row(header: list[str], cells: list[str]) -> dict[str, Any] | Malformed:
    if len(cells) != len(header):
        return Malformed(f"{len(cells)} cells, and the header names {len(header)}")
    for name, cell in zip(header, cells, strict=True):
        if not cell.isascii():
            try:
                cell.encode("utf-8")
            except UnicodeEncodeError:
                return Malformed(f"{name!r} is not UTF-8")
    return dict(zip(header, cells, strict=True))


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


READERS: dict[str, Callable[..., Iterator[Record]]] = {
    "jsonl": read_json_lines,
    "json": read_json,
    "csv": read_csv,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "array_record": read_array_record,
}
"""By the kind of a file: a function that yields its rows, from row `first` on."""


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
            yield from (reader or READERS[kind])(place)
    except UserError:
        raise
    except Exception as error:  # Libraries of file systems and formats raise any exception.
        raise explained(place.name, error, place) from error


@dataclass(frozen=True)
class Shard:
    """A file, or another part of a source that is read like one.

    Attributes:
        about: its name and an identification of its content, as JSON values.
        rows: yields the rows after a mark, each with the mark after it.
    """

    about: Sequence[Any]
    rows: Callable[[Mark], Iterator[tuple[Record, Mark]]]


def counted_rows(rows: Callable[[int], Iterator[Record]], mark: Mark) -> Iterator[tuple[Record, Mark]]:
    """Yield the rows after a mark, each with its number as the new mark.

    Args:
        rows: returns the rows from a given one on.
    """
    first = mark[0] if mark else 0
    return ((row, [number]) for number, row in enumerate(rows(first), first + 1))


@dataclass(frozen=True)
class DataFile:
    """A file as a source of rows; its methods raise UserError as `read_file`."""

    place: DataPath

    def rows(self) -> Iterator[Record]:
        """Stream the rows in order."""
        return read_file(self.place)

    def count(self, most: int | None = None) -> int:
        """Count the rows, up to `most`. Parquet states the count in its footer; other files are read."""
        place = self.place
        if kind_of(place.name) != "parquet":
            return sum(1 for _ in islice(read_file(place), most))
        place.check()
        try:
            return parquet_rows(place)
        except Exception as error:
            raise explained(place.name, error, place) from error

    def shards(self) -> list[Shard]:
        """Return the file as the only shard, identified by its size and what else its file system tells."""
        place = self.place
        place.check()
        try:
            info = place.system.info(place.path) if place.system.exists(place.path) else {}
        except Exception as error:
            raise explained(place.name, error, place) from error
        about = [place.name, *(str(info[name]) for name in TOLD if name in info)]
        return [Shard(about, self._rows_after)]

    def _rows_after(self, mark: Mark) -> Iterator[tuple[Record, Mark]]:
        kind = kind_of(self.place.name) or ""
        if kind == "jsonl":
            return read_file(self.place, lambda place: marked_lines(place, *mark))
        return counted_rows(lambda first: read_file(self.place, partial(READERS[kind], first=first)), mark)
