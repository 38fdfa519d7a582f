"""The checksums of a saved tree, which tell an intact checkpoint from a damaged one.

Array data in Orbax's files carries no checksum: a flipped bit restores without an error. So each tree of a
step (model_params, optimizer_state) holds SHA256SUMS, in the format of `sha256sum --check`: one line for
every other file below it. SHA256SUMS is written before the step gets its final name. A step with its final
name therefore has its checksums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

SUMS = "SHA256SUMS"
COMMITTED = "commit_success.txt"
"""Orbax writes this file after SHA256SUMS, and puts the time in it."""


def write(folder: Any) -> None:
    """Write SHA256SUMS into a folder, over all files in it.

    Args:
        folder: an epath.Path.
    """
    lines = [f"{_digest(folder / name)}  {name}\n" for name in sorted(_files(folder))]
    (folder / SUMS).write_text("".join(lines))


def damage(folder: Any) -> str | None:
    """Return what is wrong with the files of a folder, None if they are those that were saved.

    Args:
        folder: an epath.Path.

    Returns:
        A phrase that names the first changed file, relative to the folder's parent.

    Raises:
        OSError: when the folder cannot be read for a reason other than damage, such as missing permissions.
    """
    if not folder.is_dir():
        return f"{folder.name} is missing"
    try:
        recorded = _parse((folder / SUMS).read_text())
    except FileNotFoundError:
        return f"{folder.name}/{SUMS} is missing"
    except ValueError:
        return f"{folder.name}/{SUMS} is damaged"
    names = set(_files(folder))
    for name in sorted(recorded.keys() | names):
        if name not in names:
            return f"{folder.name}/{name} is missing"
        if name not in recorded:
            return f"{folder.name}/{SUMS} does not list {name}"
        if _digest(folder / name) != recorded[name]:
            return f"the content of {folder.name}/{name} is not what was saved"
    return None


def _files(folder: Any, prefix: str = "") -> Iterator[str]:
    """Yield names of the files below a folder, as SHA256SUMS spells them."""
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path, f"{prefix}{path.name}/")
        elif path.name != COMMITTED and prefix + path.name != SUMS:
            yield prefix + path.name


def _parse(text: str) -> dict[str, str]:
    recorded = {}
    for line in text.splitlines():
        digest, separator, name = line.partition("  ")
        if not separator or len(digest) != 64:
            raise ValueError(line)
        recorded[name] = digest
    return recorded


def _digest(path: Any) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
