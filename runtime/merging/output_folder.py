"""The folder that a merge writes, on this machine or on a file system of fsspec: each file is either complete
or absent.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from ..errors import UserError, first_line
from ..stores import AT_ONCE, PIECE, failed, read_range

PARTIAL = ".partial"
"""The end of a file's name while it is written."""

OTHER_FOLDER = "choose another folder with --output"
AGAIN = (
    "free disk space or allow writing, and run the same command again: it continues after the complete files"
)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EBADF)


class OutputFolder:
    """A folder of this machine to write into. Names are relative to it, with "/" between folders.

    Its methods raise UserError if the folder cannot be written or read. Only writes to an open file raise
    OSError.

    Attributes:
        name: its name in messages.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = str(path)

    def names(self) -> list[str]:
        """Return the names of all files in it, also in subfolders, sorted; [] if it does not exist."""
        with self.explained("read"):
            return sorted(p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if p.is_file())

    def size(self, name: str) -> int | None:
        """Return a file's size in bytes, None if it does not exist."""
        try:
            return (self.path / name).stat().st_size
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise refused(self.name, "read", error) from error

    def read(self, name: str) -> bytes:
        """Read a small file.

        Raises:
            FileNotFoundError: when it does not exist.
        """
        with self.explained("read"):
            return (self.path / name).read_bytes()

    def sha256(self, name: str) -> str:
        """Return the hash of a file's content in hexadecimal digits."""
        with self.explained("read"), (self.path / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a new file that gets its name, durably, when the block ends; a failure leaves no file."""
        target = self.path / name
        partial = target.with_name(f".{target.name}{PARTIAL}")
        # A signal may arrive as soon as the file exists.
        try:
            with self.explained("written"):
                make_folder(target.parent)
                file = partial.open("wb")
            with file:
                yield file
                with self.explained("written"):
                    file.flush()
                    os.fsync(file.fileno())
            with self.explained("written"):
                partial.replace(target)
                sync(target.parent)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise

    def write(self, name: str, data: bytes) -> None:
        """Write a small file whole; it replaces a file of the same name."""
        with self.explained("written"), self.create(name) as file:
            file.write(data)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self.explained("written"):
            (self.path / name).unlink(missing_ok=True)

    def free(self) -> int | None:
        """Return the number of bytes that can still be written; None if unknown."""
        folder = self.path
        try:
            while not folder.exists():
                folder = folder.parent
            return shutil.disk_usage(folder).free
        except OSError:
            return None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the folder, and keep other merges out of it if the file system has locks.

        Raises:
            UserError: when another process holds it, or it cannot be created.
        """
        with self.explained("written"):
            make_folder(self.path)
            descriptor = os.open(self.path, os.O_RDONLY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(
                    f"{self.name}: another process is writing it", "wait until that process ends"
                ) from None
            except OSError as error:
                # Some network file systems have no locks; writing is allowed there.
                if error.errno not in _UNSUPPORTED:
                    raise refused(self.name, "written", error) from error
            yield
        finally:
            os.close(descriptor)

    @contextmanager
    def explained(self, done: str) -> Iterator[None]:
        """Turn errors of the file system within the block into UserErrors, except, while reading, a missing
        file's.

        Args:
            done: what fails then, "read" or "written".
        """
        try:
            yield
        except OSError as error:
            if done == "read" and isinstance(error, FileNotFoundError):
                raise
            raise refused(self.name, done, error) from error


def refused(name: str, done: str, error: OSError) -> UserError:
    """Explain an OSError of a local file system to the user.

    Args:
        name: the folder's name.
        done: what failed, "read" or "written".
    """
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        return UserError(f"{name}: {error.filename} is a file, not a folder", OTHER_FOLDER)
    reason = error.strerror or first_line(error)
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return UserError(f"{name}: cannot be {done}: {reason}", f"get access to it, or {OTHER_FOLDER}")
    return UserError(f"{name}: cannot be {done}: {reason}", AGAIN if done == "written" else OTHER_FOLDER)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, durably."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync(folder.parent)


def sync(path: Path) -> None:
    """Make a folder's entries durable, if its file system supports it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def stale(names: Iterable[str]) -> list[str]:
    """Return the files of a folder that a killed process left unfinished."""
    return [n for n in names if n.rpartition("/")[2].startswith(".") and n.endswith(PARTIAL)]


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
                paths = self._system.find(self._root)
            except FileNotFoundError:
                return []
        root = self._root.strip("/")
        names = (str(path).strip("/").removeprefix(root).strip("/") for path in paths)
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
