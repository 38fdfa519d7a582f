"""Folders of runs and results, on this machine or at an address that fsspec opens."""

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
from recipec.runtime.addresses import open_address
from recipec.runtime.errors import UNREADABLE, UserError
from recipec.runtime.stores import failed

METRICS = "metrics.jsonl"
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
class Folder:
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

    def below(self, *parts: str) -> Folder:
        """Return a folder below this one; ".." leads to its parent."""
        path, name = self.path.rstrip("/"), self.name.rstrip("/")
        for part in parts:
            if part == "..":
                path, name = path.rpartition("/")[0] or "/", name.rpartition("/")[0] or "."
            else:
                path, name = f"{path}/{part}", f"{name}/{part}"
        return Folder(name, self.system, path)

    def exists(self) -> bool:
        if not self.system:
            return Path(self.path).is_dir()
        with self._reading():
            # Some file systems store only files, and derive folders from their names.
            return bool(self.system.isdir(self.path))
        return False

    def entries(self) -> dict[str, bool]:
        """Return whether each of its entries is a folder, by name; {} if it is no folder itself."""
        if not self.system:
            with suppress(OSError):
                return {entry.name: entry.is_dir() for entry in os.scandir(self.path)}
            return {}
        with self._reading():
            listed = {
                str(entry["name"]): entry.get("type") for entry in self.system.ls(self.path, detail=True)
            }
            return {name.rstrip("/").rpartition("/")[2]: kind == "directory" for name, kind in listed.items()}
        return {}

    def folders(self) -> list[str]:
        """Return the names of its subfolders, sorted."""
        return sorted(name for name, is_folder in self.entries().items() if is_folder)

    def runs(self) -> list[Folder]:
        """Return the folder if it holds a run, else its subfolders that do, else the folder."""
        if self.status(METRICS) is not None:
            return [self]
        inner = [self.below(name) for name in self.folders()]
        return [folder for folder in inner if folder.status(METRICS) is not None] or [self]

    def status(self, name: str) -> Status | None:
        """Return the status of a file or folder in it; None if it does not exist."""
        path = f"{self.path}/{name}"
        if not self.system:
            try:
                stat = Path(path).stat()
            except (OSError, ValueError):
                return None
            return Status(stat.st_size, stat.st_mtime, (stat.st_dev, stat.st_ino))
        with self._reading():
            size, changed = self.system.info(path).get("size"), None
            with suppress(NotImplementedError, KeyError, AttributeError):
                changed = self.system.modified(path).timestamp()
            return Status(int(size or 0), changed)
        return None

    def read(self, name: str, start: int | None = None, end: int | None = None) -> bytes | None:
        """Return bytes [start:end) of a file, fewer if it is shorter; None if it does not exist.

        Raises:
            ArtifactError: when it exists and cannot be read, or has more than LARGEST bytes.
        """
        path = f"{self.path}/{name}"
        with self._reading(name):
            if self.system:
                return bytes(self.system.cat_file(path, start=start, end=end))
            file = Path(path)
            if not file.is_file():  # a pipe may never end
                return None
            first, last = start or 0, file.stat().st_size if end is None else end
            if last - first > LARGEST:
                raise ArtifactError(
                    f"{self.name}/{name} has more than {LARGEST >> 20:,} MiB",
                    "check that it is the folder of a run",
                )
            with file.open("rb") as stream:
                stream.seek(first)
                return stream.read(last - first)
        return None

    def text(self, name: str) -> str | None:
        """Return a file's text; None if it does not exist."""
        content = self.read(name)
        return None if content is None else content.decode("utf-8", "replace")

    def object(self, name: str) -> dict[str, Any]:
        """Return a JSON file's object; {} if it does not exist, or is not a whole object."""
        parsed = self.value(name)
        return parsed if isinstance(parsed, dict) else {}

    def value(self, name: str) -> Any:
        """Return a JSON file's value; None if the file does not exist or is not valid JSON."""
        return json_value(self.read(name) or b"")

    @contextmanager
    def _reading(self, name: str = "") -> Iterator[None]:
        """Turn errors within the block into ArtifactErrors; ignore missing files."""
        if self.system:
            self.system.invalidate_cache()
        try:
            yield
        except (FileNotFoundError, NotADirectoryError):
            return
        except ArtifactError:
            raise
        except Exception as error:  # of this machine, or of any library that handles the address
            if self.system is None and isinstance(error, OSError):
                message = f"{self.name}/{name} cannot be read: {error.strerror or error}"
                raise ArtifactError(message, UNREADABLE) from error
            problem = failed(self.name, "read", error)
            raise ArtifactError(problem.message, problem.help) from error


def open_folder(name: str) -> Folder:
    """Open the folder of a path or address, whether it exists or not.

    Raises:
        ArtifactError: when the address cannot be opened, or is a file.
    """
    try:
        opened = open_address(name)
    except ImportError:
        raise ArtifactError(f"{name} cannot be opened: fsspec is not installed", install("train")) from None
    except UserError as error:
        raise ArtifactError(error.message, error.help) from error
    if isinstance(opened, tuple):
        return Folder(name.rstrip("/"), *opened)
    if opened.is_file():
        raise ArtifactError(f"{name} is not a folder", WAY_OUT)
    return Folder(name.rstrip("/") or name, None, str(opened.absolute()))


def existing_folder(name: str) -> Folder:
    """Open a folder that has to exist.

    Raises:
        ArtifactError: when it does not exist, or the address cannot be read.
    """
    folder = open_folder(name)
    try:
        exists = folder.exists()
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{name} cannot be read: {error}", WAY_OUT) from error
    if not exists and folder.system:
        folder.entries()  # raises where access is denied, and some file systems show no folder
    if not exists:
        raise ArtifactError(f"there is no folder {name}", WAY_OUT)
    return folder
