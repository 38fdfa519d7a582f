"""Folders that a report reads from: on this machine, or at an address that fsspec knows."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.errors import ArtifactError
from compiler.json_value import json_value
from compiler.packages import install
from runtime.errors import UNREADABLE

LARGEST = 1 << 30
"""Bytes of the largest file that is read: of the metrics of a million steps it is a third."""


@dataclass(frozen=True)
class Place:
    """A folder.

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
        return bool(self.system.isdir(self.path)) if self.system else Path(self.path).is_dir()

    def names(self) -> list[str]:
        """Of what is in it; nothing where it is no folder."""
        if self.system:
            with self._reading():
                found = self.system.ls(self.path, False)
            return sorted(str(one).rstrip("/").rpartition("/")[2] for one in found)
        return sorted(one.name for one in Path(self.path).iterdir()) if self.is_folder() else []

    def text(self, name: str) -> str | None:
        """A file's text; None where there is none.

        Raises:
            ArtifactError: it is there and cannot be read.
        """
        path = f"{self.path}/{name}"
        try:
            if self.system:
                with self._reading():
                    return bytes(self.system.cat_file(path)).decode("utf-8", "replace")
            if not Path(path).is_file():
                return None
            if Path(path).stat().st_size > LARGEST:
                raise ArtifactError(
                    f"{self.name}/{name} has more than {LARGEST >> 20:,} MiB", "is it the folder of a run?"
                )
            return Path(path).read_bytes().decode("utf-8", "replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise ArtifactError(
                f"{self.name}/{name} cannot be read: {error.strerror or error}", UNREADABLE
            ) from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Within it, what an address's library raises is an error of the folder; what is missing passes."""
        from runtime.addresses import failed

        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # of whatever library the address belongs to
            problem = failed(self.name, "read", error)
            raise ArtifactError(problem.message, problem.help) from error

    def value(self, name: str) -> Any:
        """A JSON file's value; None where there is none, or no JSON."""
        text = self.text(name)
        return None if text is None else json_value(text)

    def written(self, name: str) -> str | None:
        """When a file was last written, in UTC; None where nobody knows."""
        if self.system:
            return None
        try:
            seconds = Path(f"{self.path}/{name}").stat().st_mtime
        except OSError:
            return None
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def open_place(name: str) -> Place:
    """A folder that has to be there.

    Raises:
        ArtifactError: there is none, or the address cannot be read.
    """
    from runtime.addresses import failed, is_address, open_address
    from runtime.errors import UserError

    way_out = "give the folder of a run's checkpoints, or of a sweep's results"
    try:
        opened = open_address(name)
    except ImportError:
        raise ArtifactError(f"{name} cannot be opened: fsspec is not installed", install("train")) from None
    except UserError as error:
        raise ArtifactError(error.message, error.help) from error
    if isinstance(opened, tuple):
        place = Place(name.rstrip("/"), *opened)
    else:
        place = Place(name.rstrip("/") or name, None, str(opened.absolute()))
    try:
        found = place.is_folder()
    except Exception as error:  # of whatever library the address belongs to
        if not is_address(name):
            raise ArtifactError(f"{name} cannot be read: {error}", way_out) from error
        problem = failed(name, "read", error)
        raise ArtifactError(problem.message, problem.help) from error
    if not found and place.system:
        with suppress(FileNotFoundError, NotADirectoryError):
            place.names()  # some file systems have no folder where they may not read
    if not found:
        there = place.system is None and Path(place.path).exists()
        raise ArtifactError(f"{name} is no folder" if there else f"there is no folder {name}", way_out)
    return place
