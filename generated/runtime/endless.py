"""Paths that are no files: what waits for them waits for ever. The standard library alone."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import UserError

ENDLESS = "is no regular file, but a pipe, a device or the like"
INTO_A_FILE = "write what comes out of it into a file, and name that"


def is_endless(path: str | Path) -> bool:
    """Whether a path is a pipe, a device or the like, which may be waited for or read for ever."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_ends(path: str | Path, name: str) -> None:
    """Refuses what `is_endless`, before it is opened.

    Raises:
        UserError: with `name` for the file, and the way out.
    """
    if is_endless(path):
        raise UserError(f"{name} {ENDLESS}", INTO_A_FILE)
