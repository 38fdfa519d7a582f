"""Read a checkpoint at an address: by ranges, or copied into the user's cache."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..stores import failed, read_range
from .checkpoint_files import SIDE_FOLDERS, Files

VERSIONS = ("generation", "ETag", "etag", "md5Hash", "mtime", "LastModified", "created")
"""Entries by which fsspec's file systems show that a file was rewritten; the first that exists is used."""


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
        found = {name_of(entry): entry for entry in entries if entry["type"] == "file" and name_of(entry)}
        folders = {name_of(entry) for entry in entries if entry["type"] == "directory"}
        for side in folders.intersection(SIDE_FOLDERS):
            for entry in self._system.ls(f"{self._remote}/{side}", detail=True):
                if entry["type"] == "file" and name_of(entry):
                    found[f"{side}/{name_of(entry)}"] = entry
        # The listing of a file's address is that file.
        itself = self._remote.strip("/")
        found = {name: entry for name, entry in found.items() if str(entry["name"]).strip("/") != itself}
        if not found and not folders:
            raise FileNotFoundError(self._remote)
        sizes = {}
        for name, entry in found.items():
            size = entry.get("size")
            sizes[name] = self._system.size(f"{self._remote}/{name}") if size is None else size
        return sizes

    def _range(self, name: str, start: int, end: int) -> bytearray:
        try:
            return read_range(self._system, f"{self._remote}/{name}", start, end)
        except Exception as error:  # an error of any library behind the address
            raise failed(self.path(name), "read", error) from error


def fetch_bucket(url: str) -> Path:
    """Copy a checkpoint from a bucket into the user's cache; unchanged copies are kept.

    Several processes of one machine take turns; the first one copies.
    """
    from fsspec.core import url_to_fs

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recipec"
    target = cache / f"{url.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    try:
        system, root = url_to_fs(url)
        entries = [entry for entry in system.ls(root, detail=True) if entry["type"] == "file"]
        target.mkdir(parents=True, exist_ok=True)
        with _alone(target):
            copies = _Copies(system, target)
            copies.keep_only(entries)
            for entry in sorted(entries, key=lambda entry: str(entry["name"])):
                copies.bring(entry)
    except Exception as error:  # an error of any library behind the address
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"{target}: the copy of {url} does not fit: {error.strerror}",
                "free disk space there, or set XDG_CACHE_HOME to a folder on a larger disk",
            ) from error
        raise failed(url, "copied", error) from error
    return target


class _Copies:
    """Copies of files, and a record next to their folder of each file's version."""

    def __init__(self, system: Any, folder: Path) -> None:
        self._system, self._folder = system, folder
        self._record = folder.with_name(f"{folder.name}.json")
        self._versions: dict[str, str] = {}
        with suppress(OSError, ValueError, TypeError, RecursionError):
            self._versions = dict(json.loads(self._record.read_text()))

    def keep_only(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Remove copies of files that the bucket no longer has: an old model.safetensors would be loaded
        instead of new files."""
        names = {name_of(entry) for entry in entries}
        for copy in self._folder.iterdir():
            if copy.name not in names:
                copy.unlink()

    def bring(self, entry: Mapping[str, Any]) -> None:
        """Copy a file, unless it was copied before and has not changed since."""
        name = name_of(entry)
        copy, part = self._folder / name, self._folder / f".{name}.part"
        # Retrained weights have the same size as the old ones.
        version = next((str(entry[key]) for key in VERSIONS if entry.get(key) is not None), "")
        same = self._versions.get(name, version) == version
        if same and copy.is_file() and copy.stat().st_size == entry["size"]:
            return
        with self._system.open(entry["name"], "rb") as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 24)
        if part.stat().st_size != entry["size"]:
            raise EOFError(f"{name} ends before byte {entry['size']}")
        copy.unlink(missing_ok=True)
        self._versions[name] = version
        self._record.write_text(json.dumps(self._versions, indent=1))
        part.replace(copy)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep other processes of this machine out of the block, if the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def name_of(entry: Mapping[str, Any]) -> str:
    """Return a file's name from its entry in fsspec's listing of a folder."""
    return str(entry["name"]).rpartition("/")[2]
