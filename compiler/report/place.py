"""The folder of a run, on this machine or at an address that fsspec opens."""

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
"""Bytes of the largest file that is read whole: of the metrics of a million steps it is a third."""
WAY_OUT = "give the folder of a run's checkpoints, or of a sweep's results"


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

    @property
    def age(self) -> float | None:
        """Seconds since it was last written, None where that is not told."""
        return None if self.changed is None else max(0.0, time.time() - self.changed)


@dataclass(frozen=True)
class Place:
    """A folder, which need not be there yet.

    Every method raises ArtifactError where an address cannot be read; what is missing raises nothing.

    Attributes:
        name: as the user gave it, or below that.
        system: fsspec's file system of an address; None for this machine.
        path: on it.
    """

    name: str
    system: Any
    path: str

    def below(self, *parts: str) -> Place:
        """A folder in it, or beside it by ".."."""
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
            # Some file systems have files alone, and their folders by name.
            return bool(self.system.isdir(self.path))
        return False

    def names(self) -> list[str]:
        """Of what is in it; nothing where it is no folder."""
        return sorted(name for name, _ in self._entries())

    def folders(self) -> list[str]:
        """The names of the folders in it."""
        return sorted(name for name, folder in self._entries() if folder)

    def _entries(self) -> list[tuple[str, bool]]:
        """Names, and whether each is a folder."""
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
        """Of a file or folder in it, None where there is none."""
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
        """Bytes [start:end) of a file; fewer when there are no more."""
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
        """A file's text; None where there is none.

        Raises:
            ArtifactError: it is there and cannot be read.
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
                    f"{self.name}/{name} has more than {LARGEST >> 20:,} MiB", "is it the folder of a run?"
                )
            return file.read_bytes().decode("utf-8", "replace")
        except OSError as error:
            raise ArtifactError(
                f"{self.name}/{name} cannot be read: {error.strerror or error}", UNREADABLE
            ) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Within it, what an address's library raises is an error of the folder; what is missing passes."""
        from recipec.runtime.addresses import failed

        self.system.invalidate_cache()
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            return
        except Exception as error:  # of whatever library the address belongs to
            problem = failed(self.name, "read", error)
            raise ArtifactError(problem.message, problem.help) from error

    def value(self, name: str) -> Any:
        """A JSON file's value; None where there is none, or no JSON."""
        text = self.text(name)
        return None if text is None else json_value(text)

    def written(self, name: str) -> str | None:
        """When a file of this machine was last written, in UTC; None where nobody knows."""
        status = None if self.system else self.status(name)
        if status is None or status.changed is None:
            return None
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(status.changed))


def open_place(name: str) -> Place:
    """The folder of a path or address, whether it is there or not.

    Raises:
        ArtifactError: nothing opens the address.
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
    """A folder that has to be there.

    Raises:
        ArtifactError: there is none, or the address cannot be read.
    """
    place = open_place(name)
    try:
        found = place.is_folder()
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{name} cannot be read: {error}", WAY_OUT) from error
    if not found and place.system:
        place.names()  # some file systems have no folder where they may not read
    if not found:
        there = place.system is None and Path(place.path).exists()
        raise ArtifactError(f"{name} is no folder" if there else f"there is no folder {name}", WAY_OUT)
    return place
