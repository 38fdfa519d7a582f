"""Paths and addresses; stores.py has the file systems of addresses."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import UserError
from .stores import check_upload, failed, opened, without_cache


def is_address(text: str | Path) -> bool:
    """Return whether a value is an address for fsspec rather than a path on this machine."""
    return "://" in str(text)


def folder_or_address(text: str) -> Path | str:
    """Parse an argument of a script: a folder, or an unchanged address."""
    return text if is_address(text) else Path(text)


def folder(text: str) -> Path:
    """Parse an argument of a script: a folder of this machine, not an address."""
    if is_address(text):
        raise argparse.ArgumentTypeError(f"{text} is an address; give a folder on this machine")
    return Path(text)


def read_by_orbax(directory: str | Path) -> bool:
    """Return whether Orbax itself reads and writes checkpoints at an address.

    A bucket has no renames: a step has its final name from the beginning, and its last file marks it as
    complete (`manifest.COMMITTED`).
    """
    return str(directory).startswith("gs://")


def check_uploads(*addresses: str | Path | None) -> None:
    """Refuse addresses that this version of Python cannot write to; local paths and None are accepted.

    Raises:
        UserError: naming the first such address.
    """
    for address in addresses:
        if address is not None and is_address(address):
            check_upload(address)


def path_of(directory: str | Path) -> Any:
    """Return a folder as etils.epath's path."""
    from etils import epath

    if read_by_orbax(directory):
        without_cache()
    return epath.Path(directory)


@contextmanager
def reached(directory: str | Path, done: str = "read") -> Iterator[None]:
    """Turn errors of an address's file system within the block into errors for the user.

    Errors of this machine's file systems pass unchanged and, while reading, those for missing files.

    Args:
        done: as in `stores.failed`.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # an error of any library behind the address
        missing = isinstance(error, FileNotFoundError) and done == "read"
        if missing or not is_address(directory):
            raise
        raise failed(str(directory), done, error) from error


def write_whole(directory: str | Path, name: str, content: bytes) -> None:
    """Write a file into a folder, completely or not at all; create the folder.

    Raises:
        UserError: when an address cannot be written.
        OSError: when a folder of this machine cannot be written.
    """
    target = path_of(directory)
    with reached(directory, "written"):
        target.mkdir(parents=True, exist_ok=True)
        if is_address(directory):
            (target / name).write_bytes(content)  # an object exists only after its upload has ended
            return
        temporary = target / f".{name}.partial"
        temporary.write_bytes(content)
        temporary.replace(target / name)


def open_address(address: str | Path) -> Path | tuple[Any, str]:
    """Return a path on this machine, or fsspec's file system of an address and the path on it.

    Raises:
        UserError: when no file system is known for the address, its package is missing, or access is refused.
    """
    if not is_address(address):
        return Path(address).expanduser()
    return opened(str(address))
