"""The folder that a merge writes, on a file system of fsspec."""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, cast

from ..errors import UserError, first_line
from ..stores import AT_ONCE, PIECE, failed, read_range
from .folder import OutputFolder

PART = 1 << 26
"""Bytes of one part of an upload."""


class RemoteFolder(OutputFolder):
    """A folder on a file system of fsspec, which does its own retries: a file appears when it is closed."""

    def __init__(self, address: str, system: Any, root: str) -> None:
        self.name = address.rstrip("/")
        self._system = system
        self._root = root

    def names(self) -> list[str]:
        self._system.invalidate_cache()
        with self.explained("read"):
            try:
                found = self._system.find(self._root)
            except FileNotFoundError:
                return []
        root = self._root.strip("/")
        names = (str(path).strip("/").removeprefix(root).strip("/") for path in found)
        return sorted(name for name in names if name)

    def size(self, name: str) -> int | None:
        self._system.invalidate_cache()
        with self.explained("read"):
            try:
                entry = self._system.info(self._path(name))
            except FileNotFoundError:
                return None
        return int(entry["size"]) if entry["type"] == "file" else None

    def read(self, name: str) -> bytes:
        with self.explained("read"):
            return bytes(self._system.cat_file(self._path(name)))

    def sha256(self, name: str) -> str:
        digest, size = hashlib.sha256(), self.size(name) or 0
        with self.explained("read"):
            for start in range(0, size, PIECE * AT_ONCE):
                end = min(size, start + PIECE * AT_ONCE)
                digest.update(read_range(self._system, self._path(name), start, end))
        return digest.hexdigest()

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        with self.explained("written"):
            file = self._system.open(self._path(name), "wb", block_size=PART)
        try:
            yield cast(IO[bytes], _Upload(file))
            with self.explained("written"):
                file.close()
        except BaseException:
            with contextlib.suppress(Exception):
                try:
                    file.discard()
                finally:
                    file.closed = True  # closing it, as its destructor would, would create the object
            raise

    def write(self, name: str, data: bytes) -> None:
        with self.explained("written"):
            self._system.pipe_file(self._path(name), data)

    def remove(self, name: str) -> None:
        with self.explained("written"), contextlib.suppress(FileNotFoundError):
            self._system.rm_file(self._path(name))

    def free(self) -> int | None:
        return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Do nothing: object stores have no locks that end with a killed process.

        Only the journal distinguishes two merges into one such folder: a later, different merge is refused.
        Two runs of the same merge write the same bytes.
        """
        yield

    @contextmanager
    def explained(self, done: str) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # an error of any library behind the address
            if done == "read" and isinstance(error, FileNotFoundError):
                raise
            raise failed(self.name, done, error) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class _Upload(io.RawIOBase):
    """A file that is being uploaded; any failure of its library becomes an OSError."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{type(error).__name__}: {first_line(error)}") from error
        return memoryview(data).nbytes
