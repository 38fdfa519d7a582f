"""The folder of a run, on this machine or at an address that fsspec opens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from runtime.addresses import failed, is_address, open_address


@dataclass(frozen=True)
class Status:
    """Of a file or folder.

    Attributes:
        size: bytes.
        changed: when it was last written, in seconds since 1970; None where the place does not say.
        identity: another one means another file under the same name; None where the place has none.
    """

    size: int
    changed: float | None
    identity: tuple[int, int] | None = None


class Place(Protocol):
    """A folder.

    Attributes:
        name: as messages call it.
        here: whether it is on this machine.
    """

    name: str
    here: bool

    def exists(self) -> bool: ...

    def status(self, file: str) -> Status | None:
        """Of a file or folder in it, None where there is none."""

    def read(self, file: str, start: int, end: int) -> bytes:
        """Bytes [start:end) of a file; fewer, when there are no more."""

    def folders(self) -> list[str]:
        """The names of the folders in it."""


def open_place(text: str) -> Place:
    """The folder of a path or address.

    Raises:
        UserError: when nothing opens the address.
    """
    if not is_address(text):
        return Here(Path(text).expanduser(), text)
    found = open_address(text)
    return Here(found, text) if isinstance(found, Path) else There(*found, text)


class Here:
    """A folder on this machine."""

    here = True

    def __init__(self, path: Path, name: str) -> None:
        self._path, self.name = path, name

    def exists(self) -> bool:
        return self._path.is_dir()

    def status(self, file: str) -> Status | None:
        try:
            found = os.stat(self._path / file)
        except OSError:
            return None
        return Status(found.st_size, found.st_mtime, (found.st_dev, found.st_ino))

    def read(self, file: str, start: int, end: int) -> bytes:
        try:
            with (self._path / file).open("rb") as stream:
                stream.seek(start)
                return stream.read(end - start)
        except OSError:
            return b""

    def folders(self) -> list[str]:
        try:
            return [entry.name for entry in os.scandir(self._path) if entry.is_dir()]
        except OSError:
            return []


class There:
    """A folder at an address.

    Args:
        system: fsspec's.
        root: the path on it.
    """

    here = False

    def __init__(self, system: Any, root: str, name: str) -> None:
        self._system, self._root, self.name = system, root, name

    def exists(self) -> bool:
        with self._reading():
            # Some file systems have files alone, and their folders by name.
            return bool(self._system.isdir(self._root))
        return False

    def status(self, file: str) -> Status | None:
        path = f"{self._root}/{file}"
        with self._reading():
            found = self._system.info(path)
            changed = None
            with suppress(NotImplementedError, KeyError, AttributeError):
                changed = self._system.modified(path).timestamp()
            return Status(int(found.get("size") or 0), changed)
        return None

    def read(self, file: str, start: int, end: int) -> bytes:
        with self._reading():
            return bytes(self._system.cat_file(f"{self._root}/{file}", start=start, end=end))
        return b""

    def folders(self) -> list[str]:
        with self._reading():
            found = self._system.ls(self._root, detail=True)
            names = (entry["name"] for entry in found if entry.get("type") == "directory")
            return [name.rstrip("/").rpartition("/")[2] for name in names]
        return []

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Within it, what is missing gives nothing, and another failure an error of the address."""
        self._system.invalidate_cache()
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            return
        except Exception as error:  # of whatever library the address belongs to
            raise failed(self.name, "read", error) from error


def age(status: Status | None) -> float | None:
    """Seconds since a file was last written, None where that is not told."""
    return None if status is None or status.changed is None else max(0.0, time.time() - status.changed)
