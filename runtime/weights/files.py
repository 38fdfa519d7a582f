"""The files of a checkpoint's folder: mapped if they are local, otherwise read by ranges from an address."""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..stores import failed, read_range

AGAIN = "copy or download the checkpoint again"
SIDE_FOLDERS = ("additional_chat_templates",)
"""The only subfolders that belong to a checkpoint."""


class Files:
    """The files of a folder on this machine, by their names in it.

    Attributes:
        name: the folder's name in messages.
        folder: its local path, None if it is not local.
        exists: whether the folder exists.
        sizes: size in bytes of every file in it and in its side folders.

    Raises:
        UserError: when it cannot be listed.
    """

    folder: Path | None

    def __init__(self, folder: Path) -> None:
        self.name = str(folder)
        self.folder = folder
        self._root = folder
        self._maps: dict[str, mmap.mmap] = {}
        self.exists = folder.is_dir()
        try:
            self.sizes: Mapping[str, int] = {
                str(path.relative_to(folder)): path.stat().st_size
                for parent in (folder, *(folder / side for side in SIDE_FOLDERS))
                if parent.is_dir()
                for path in parent.iterdir()
                if path.is_file()
            }
        except OSError as error:
            raise UserError(f"{folder}: {error.strerror or error}", "check that you may read it") from error

    def path(self, name: str) -> str:
        """Return a file's name for messages."""
        return str(self._root / name)

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """Return a copy of a file's bytes [start:end), by default to its end.

        Raises:
            UserError: when it cannot be read.
        """
        try:
            with (self._root / name).open("rb") as file:
                file.seek(start)
                return file.read() if end is None else file.read(end - start)
        except OSError as error:
            raise UserError(f"{self.path(name)}: {error.strerror or error}", AGAIN) from error

    def view(self, name: str, start: int, end: int) -> memoryview:
        """Return the bytes [start:end) of a file, read-only, and mapped if possible.

        Raises:
            UserError: when they cannot be read.
        """
        if name not in self._maps:
            try:
                with (self._root / name).open("rb") as file:
                    self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except OSError as error:
                raise UserError(f"{self.path(name)}: {error.strerror or error}", AGAIN) from error
        return memoryview(self._maps[name])[start:end]

    def release(self, name: str, start: int, end: int, forget: bool = False) -> None:
        """Let the system reclaim the memory of viewed bytes; `forget` also drops them from its disk cache.

        A merge reads a base once. Its pages would displace other pages, and reusing a released page is
        cheaper than a fresh one: a third of the time of a merge from a cold disk.
        """
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        length = end // mmap.PAGESIZE * mmap.PAGESIZE - first
        if name in self._maps and length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[name].madvise(mmap.MADV_DONTNEED, first, length)
            if forget and hasattr(os, "posix_fadvise"):
                with (self._root / name).open("rb") as file:
                    os.posix_fadvise(file.fileno(), start, end - start, os.POSIX_FADV_DONTNEED)


def json_object(content: bytes, path: str, help: str = AGAIN) -> dict[str, Any]:
    """Return the JSON object of a file; raise UserError if it holds none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error})", help) from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object", help)
    return value


class RemoteFiles(Files):
    """A folder on a file system of fsspec, which does its own retries."""

    def __init__(self, address: str, system: Any, root: str) -> None:
        self.name = address.rstrip("/")
        self.folder = None
        self._system = system
        self._remote = root
        self.exists = True
        system.invalidate_cache()
        try:
            self.sizes = self._list()
        except (FileNotFoundError, NotADirectoryError):
            self.exists, self.sizes = False, {}
        except Exception as error:  # an error of any library behind the address
            raise failed(self.name, "read", error) from error

    def path(self, name: str) -> str:
        return f"{self.name}/{name}"

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        return bytes(self._range(name, start, self.sizes[name] if end is None else end))

    def view(self, name: str, start: int, end: int) -> memoryview:
        return memoryview(self._range(name, start, end)).toreadonly()

    def release(self, name: str, start: int, end: int, forget: bool = False) -> None:
        """Do nothing: viewed bytes are a copy."""

    def _list(self) -> dict[str, int]:
        entries = self._system.ls(self._remote, detail=True)
        files = {name_of(entry): entry for entry in entries if entry["type"] == "file" and name_of(entry)}
        folders = {name_of(entry) for entry in entries if entry["type"] == "directory"}
        for side in folders.intersection(SIDE_FOLDERS):
            for entry in self._system.ls(f"{self._remote}/{side}", detail=True):
                if entry["type"] == "file" and name_of(entry):
                    files[f"{side}/{name_of(entry)}"] = entry
        # The listing of a file's address is that file.
        itself = self._remote.strip("/")
        files = {name: entry for name, entry in files.items() if str(entry["name"]).strip("/") != itself}
        if not files and not folders:
            raise FileNotFoundError(self._remote)
        sizes = {}
        for name, entry in files.items():
            size = entry.get("size")
            sizes[name] = self._system.size(f"{self._remote}/{name}") if size is None else size
        return sizes

    def _range(self, name: str, start: int, end: int) -> bytearray:
        try:
            return read_range(self._system, f"{self._remote}/{name}", start, end)
        except Exception as error:  # an error of any library behind the address
            raise failed(self.path(name), "read", error) from error


def name_of(entry: Mapping[str, Any]) -> str:
    """Return a file's name from its entry in fsspec's listing of a folder."""
    return str(entry["name"]).rpartition("/")[2]
