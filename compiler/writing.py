"""Write files that a user names: completely or not at all, and without replacing anything but a file."""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from recipec.compiler.errors import WAYS_OUT, ArtifactError

START, END = ".recipe-", ".part"
LEFT = re.compile(r"\.recipe-[a-z0-9_]{8}\.part")
"""Prefix, suffix and pattern of temporary files."""


@contextmanager
def replacing(target: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file next to `target` that replaces it at the end. After an error nothing is left of
    it.

    A link is followed: its target is replaced.

    Raises:
        ArtifactError: `target` is a folder or a device, or cannot be written.
    """
    real = demand_writable(target)
    temporary = None
    try:
        clear(real.parent)
        handle, temporary = _locked(real.parent)
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.chmod(temporary, 0o666 & ~umask())
            os.replace(temporary, real)
        temporary = None
    except OSError as error:
        if error.filename in (None, temporary) or str(error.filename).startswith(f"{real.parent}/{START}"):
            raise cannot_be_written(target, error) from error
        raise
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def _locked(folder: Path) -> tuple[int, str]:
    """Create a locked file in a folder; return its handle and its name. The lock shows that its writer is
    alive."""
    while True:
        handle, name = tempfile.mkstemp(prefix=START, suffix=END, dir=folder)
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:  # else another command removed it before it was locked
            return handle, name
        os.close(handle)


def clear(folder: Path) -> None:
    """Remove what killed commands left in a folder. What may belong to something else stays."""
    leftovers: list[str] = []
    with suppress(OSError), os.scandir(folder) as entries:
        leftovers = [entry.path for entry in entries if LEFT.fullmatch(entry.name)]
    for path in leftovers:
        with suppress(OSError):
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                about = os.fstat(handle)
                if about.st_uid == os.getuid() and about.st_mode == stat.S_IFREG | 0o600:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(path)
            finally:
                os.close(handle)


def write_text(target: Path, text: str) -> None:
    """Write a text as UTF-8, in the way of `replacing`.

    Raises:
        ArtifactError: as for `replacing`.
    """
    with replacing(target) as file:
        file.write(text.encode("utf-8", "backslashreplace"))


def demand_writable(target: Path) -> Path:
    """Return the path where a file will be written, with links followed. Call it before the work for the
    file.

    Raises:
        ArtifactError: the path is a folder or a device, or its folder is missing or not writable.
    """
    real = Path(os.path.realpath(target))
    way_out = "give a file in a folder that exists and can be written"
    try:
        mode = os.lstat(real).st_mode
    except FileNotFoundError:
        if not os.path.isdir(real.parent):
            raise ArtifactError(
                f"{target} cannot be written: there is no folder {target.parent}", way_out
            ) from None
    except (OSError, ValueError) as error:
        raise cannot_be_written(target, error) from error
    else:
        if stat.S_ISDIR(mode):
            raise ArtifactError(f"{target} is a folder", way_out)
        if not stat.S_ISREG(mode):
            raise ArtifactError(f"{target} is not a regular file", way_out)
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise ArtifactError(f"{target} cannot be written: Permission denied", way_out)
    return real


def cannot_be_written(target: Path, error: OSError | ValueError) -> ArtifactError:
    """Return the error for a path that the operating system refuses to write."""
    reason = getattr(error, "strerror", None) or error
    return ArtifactError(
        f"{target} cannot be written: {reason}", WAYS_OUT.get(getattr(error, "errno", 0) or 0)
    )


def umask() -> int:
    """Return the permission bits that new files are created without."""
    current = os.umask(0o022)
    os.umask(current)
    return current
