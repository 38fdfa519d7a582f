"""A run's folder, on this machine or at an address that fsspec opens."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.packages import install
from recipec.runtime.errors import UNREADABLE

LARGEST = 1 << 30
"""Most bytes of a file that is read whole; the metrics of a million steps take a third of it."""
WAY_OUT = "give the folder of a run's checkpoints, or of a sweep's results"


@dataclass(frozen=True)
class Status:
    """The status of a file or folder.

    Attributes:
        size: bytes.
        changed: time of the last write, in seconds since 1970; None if the file system does not report it.
        identity: changes if another file takes the same name; None if the file system has none.
    """

    size: int
    changed: float | None
    identity: tuple[int, int] | None = None

    @property
    def age(self) -> float | None:
        """Seconds since the last write; None if the time is not known."""
        return None if self.changed is None else max(0.0, time.time() - self.changed)


@dataclass(frozen=True)
class Place:
    """A folder, which need not exist yet.

    Every method raises ArtifactError if an address cannot be read. A missing file raises nothing.

    Attributes:
        name: as the user gave it, or a path below that.
        system: fsspec's file system for an address; None for this machine.
        path: path in that file system.
    """

    name: str
    system: Any
    path: str

    def below(self, *parts: str) -> Place:
        """Return a folder below this one; ".." leads to its parent."""
        path, name = self.path.rstrip("/"), self.name.rstrip("/")
        for part in parts:
            if part == "..":
                path, name = path.rpartition("/")[0] or "/", name.rpartition("/")[0] or "."
            else:
                path, name = f"{path}/{part}", f"{name}/{part}"
        return Place(name, self.system, path)

    def is_folder(self) -> bool:
        if not self.system:
            return Path(self.path).is_dir()
        with self._reading():
            # Some file systems store only files, and derive folders from their names.
            return bool(self.system.isdir(self.path))
        return False

    def names(self) -> list[str]:
        """Return the names of its entries; nothing if it is not a folder."""
        return sorted(name for name, _ in self._entries())

    def folders(self) -> list[str]:
        """Return the names of its subfolders."""
        return sorted(name for name, folder in self._entries() if folder)

    def _entries(self) -> list[tuple[str, bool]]:
        """Return its entries: each name, and whether it is a folder."""
        if not self.system:
            try:
                return [(entry.name, entry.is_dir()) for entry in os.scandir(self.path)]
            except OSError:
                return []
        with self._reading():
            found = self.system.ls(self.path, detail=True)
            return [
                (str(one["name"]).rstrip("/").rpartition("/")[2], one.get("type") == "directory")
                for one in found
            ]
        return []

    def status(self, name: str) -> Status | None:
        """Return the status of a file or folder in it; None if it does not exist."""
        path = f"{self.path}/{name}"
        if not self.system:
            try:
                found = Path(path).stat()
            except (OSError, ValueError):
                return None
            return Status(found.st_size, found.st_mtime, (found.st_dev, found.st_ino))
        with self._reading():
            size, changed = self.system.info(path).get("size"), None
            with suppress(NotImplementedError, KeyError, AttributeError):
                changed = self.system.modified(path).timestamp()
            return Status(int(size or 0), changed)
        return None

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return bytes [start:end) of a file; fewer if the file is shorter."""
        path = f"{self.path}/{name}"
        if not self.system:
            try:
                with Path(path).open("rb") as stream:
                    stream.seek(start)
                    return stream.read(end - start)
            except OSError:
                return b""
        with self._reading():
            return bytes(self.system.cat_file(path, start=start, end=end))
        return b""

    def text(self, name: str) -> str | None:
        """Return a file's text; None if it does not exist.

        Raises:
            ArtifactError: when it exists and cannot be read.
        """
        if self.system:
            with self._reading():
                return bytes(self.system.cat_file(f"{self.path}/{name}")).decode("utf-8", "replace")
            return None
        file = Path(self.path, name)
        try:
            if not file.is_file():
                return None
            if file.stat().st_size > LARGEST:
                raise ArtifactError(
                    f"{self.name}/{name} has more than {LARGEST >> 20:,} MiB",
                    "check that it is the folder of a run",
                )
            return file.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise ArtifactError(
                f"{self.name}/{name} cannot be read: {error.strerror or error}", UNREADABLE
            ) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Turn errors of an address's library into ArtifactErrors within the block; ignore missing files."""
        from recipec.runtime.stores import failed

        self.system.invalidate_cache()
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            return
        except Exception as error:  # from any library that handles the address
            problem = failed(self.name, "read", error)
            raise ArtifactError(problem.message, problem.help) from error

    def value(self, name: str) -> Any:
        """Return a JSON file's value; None if the file does not exist or is not valid JSON."""
        text = self.text(name)
        return None if text is None else json_value(text)

    def written(self, name: str) -> str | None:
        """Return when a file on this machine was last written, in UTC; None if that is not known."""
        status = None if self.system else self.status(name)
        if status is None or status.changed is None:
            return None
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(status.changed))


def open_place(name: str) -> Place:
    """Open the folder of a path or address, whether it exists or not.

    Raises:
        ArtifactError: when the address cannot be opened.
    """
    from recipec.runtime.addresses import open_address
    from recipec.runtime.errors import UserError

    try:
        opened = open_address(name)
    except ImportError:
        raise ArtifactError(f"{name} cannot be opened: fsspec is not installed", install("train")) from None
    except UserError as error:
        raise ArtifactError(error.message, error.help) from error
    if isinstance(opened, tuple):
        return Place(name.rstrip("/"), *opened)
    return Place(name.rstrip("/") or name, None, str(opened.absolute()))


def existing_place(name: str) -> Place:
    """Open a folder that has to exist.

    Raises:
        ArtifactError: when it does not exist, or the address cannot be read.
    """
    place = open_place(name)
    try:
        found = place.is_folder()
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{name} cannot be read: {error}", WAY_OUT) from error
    if not found and place.system:
        place.names()  # some file systems show no folder where access is denied; this call raises the error
    if not found:
        there = place.system is None and Path(place.path).exists()
        raise ArtifactError(f"{name} is not a folder" if there else f"there is no folder {name}", WAY_OUT)
    return place
