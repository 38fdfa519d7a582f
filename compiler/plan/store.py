"""What planning found out, kept between commands: a file for each result, named by what it depends on.

In $RECIPEC_CACHE, else below $XDG_CACHE_HOME or ~/.cache. A result is never out of date: whatever could
change it is part of its name. An entry that cannot be read counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def folder() -> Path:
    """Where results lie."""
    given = os.environ.get("RECIPEC_CACHE")
    if given:
        return Path(given).expanduser() / "plan"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "recipec" / "plan"


def key(*parts: object) -> str:
    """A name for a result: a digest of JSON values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def get(name: str) -> str | None:
    """What is kept under a name, None for nothing."""
    try:
        return _path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


put_now: list[str] = []
"""Names of what this process has kept."""


def put(name: str, value: str) -> None:
    """Keeps a result. Where the folder cannot be written, nothing is kept, and the next command works it out
    again."""
    path = _path(name)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(value)
        os.replace(file.name, path)
        put_now.append(name)


def _path(name: str) -> Path:
    return folder() / name[:2] / f"{name}.json"
