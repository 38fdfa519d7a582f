"""The folder that a merge writes: files that are whole or not there."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Protocol

from runtime.errors import UserError

CHUNK = 1 << 24
PARTIAL = ".partial"
"""What the name of a file ends with while it is written."""


class OutputFolder(Protocol):
    """A folder to write into; names are relative to it, with "/" between folders.

    Attributes:
        name: as messages call it.
        local: whether other programs can open its files by their paths.
    """

    name: str
    local: bool

    def names(self) -> list[str]:
        """The files in it and below, sorted; [] when it does not exist."""

    def size(self, name: str) -> int | None:
        """Bytes of a file, None when there is none."""

    def read(self, name: str) -> bytes:
        """A small file's content.

        Raises:
            FileNotFoundError: when there is none.
        """

    def sha256(self, name: str) -> str:
        """Of a file's content, in hexadecimal digits."""

    def create(self, name: str) -> AbstractContextManager[IO[bytes]]:
        """A new file that has its name once the block ends, durably; none is left when it fails."""

    def write(self, name: str, data: bytes) -> None:
        """Writes a small file whole, in place of one of that name."""

    def remove(self, name: str) -> None:
        """Removes a file, if it is there."""

    def free(self) -> int | None:
        """Bytes that can still be written; None where nobody knows."""

    def locked(self) -> AbstractContextManager[None]:
        """Makes the folder, and keeps other merges out of it.

        Raises:
            UserError: when another process holds it, or it cannot be made.
        """


class LocalFolder:
    """A folder on this machine."""

    local = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def names(self) -> list[str]:
        return sorted(str(p.relative_to(self.path)) for p in self.path.rglob("*") if p.is_file())

    def size(self, name: str) -> int | None:
        try:
            return (self.path / name).stat().st_size
        except FileNotFoundError:
            return None

    def read(self, name: str) -> bytes:
        return (self.path / name).read_bytes()

    def sha256(self, name: str) -> str:
        with (self.path / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        target = self.path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}{PARTIAL}")
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        sync(target.parent)

    def write(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)

    def free(self) -> int | None:
        folder = self.path
        while not folder.exists():
            folder = folder.parent
        return shutil.disk_usage(folder).free

    @contextmanager
    def locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise UserError(f"{self.name}: another process is writing it", "wait for that one to end") from None
        try:
            yield
        finally:
            os.close(descriptor)


def output_folder(address: str | Path) -> OutputFolder:
    """The folder of a path or an address that fsspec knows.

    Raises:
        UserError: when no file system is known for the address, or what opens it is not installed.
    """
    if "://" in str(address):
        raise UserError(f"{address}: only local folders so far")
    return LocalFolder(Path(address).expanduser())


def sync(path: Path) -> None:
    """Makes a file's or a folder's content durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
