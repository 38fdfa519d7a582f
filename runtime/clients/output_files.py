"""Files that a server's clients write, and the errors of doing so."""

from __future__ import annotations

from collections.abc import Callable
from os import fsync
from pathlib import Path

from .. import errors
from ..errors import UserError


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically, so that it never exists in part.

    Half of a surrogate pair, which a server's answer may hold, becomes an escape as in JSON and Python.

    Raises:
        UserError: the file cannot be written.
    """
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
            file.flush()
            fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        raise UserError(
            f"{path} cannot be written: {error.strerror}", "free disk space there, or get access to it"
        ) from None


def guarded(main: Callable[[], int]) -> int:
    """Run a script's main function like `errors.guarded`, and report files that cannot be read or written."""
    try:
        return errors.guarded(main)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        errors.report(UserError(f"{where}{error.strerror or error}"))
        return 1
