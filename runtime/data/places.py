"""The places of sources: local files and folders, and any address that fsspec opens."""

from __future__ import annotations

import gzip
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..addresses import is_address
from ..endless import check_ends
from ..errors import UserError, first_line

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
    if is_address(name):
        from ..stores import unavailable

        if found := unavailable(name, error):
            return found
    which = "" if isinstance(error, (OSError, ValueError, EOFError)) else f"{type(error).__name__}: "
    help = "check that it is complete, and that its ending names its format" if kind_of(name) else None
    if isinstance(error, ImportError) and error.name:
        help = f"pip install {error.name.partition('.')[0]}"
    return UserError(f"{name} cannot be read: {which}{reason}", help)


def address_of(path: str) -> tuple[str, str | None]:
    """Return OWNER/NAME and the revision (None for the newest) of a data set of the hub."""
    name, _, revision = path.removeprefix(HUB).removeprefix("datasets/").strip("/").partition("@")
    return name, revision or None
