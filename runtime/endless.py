"""Detect paths that are not files, whose reader would wait forever. Only the standard library."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError

ENDLESS = "is not a regular file, but a pipe, a device or similar"
INTO_A_FILE = "write its content to a file, and give that file"


def is_endless(path: str | Path) -> bool:
    """Return whether a path is a pipe, a device or the like, which may block or never end."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_ends(path: str | Path, name: str) -> None:
    """Refuse a path that `is_endless`, before it is opened.

    Raises:
        UserError: with `name` for the file, and advice.
    """
    if is_endless(path):
        raise UserError(f"{name} {ENDLESS}", INTO_A_FILE)
