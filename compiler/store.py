"""The cache of planning results: one file for each result, named by everything that it depends on.

The cache is in $RECIPEC_CACHE, else below $XDG_CACHE_HOME or ~/.cache. A result is never out of date, because
everything that could change it is part of its name. An entry that cannot be read counts as missing.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from contextlib import suppress
from pathlib import Path


def folder() -> Path:
    """Return the folder of the results."""
    path = os.environ.get("RECIPEC_CACHE")
    if path:
        return Path(path).expanduser() / "plan"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "recipec" / "plan"


def key(*parts: object) -> str:
    """Return a name for a result: the digest of JSON values."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def get(name: str) -> str | None:
    """Return the text stored under a name, or None."""
    try:
        return _path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


put_now: list[str] = []
"""Names of the results that this process has stored."""


def put(name: str, value: str) -> None:
    """Store a result. If the folder cannot be written, store nothing: the next command compiles again."""
    path = _path(name)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(value)
        os.replace(file.name, path)
        put_now.append(name)


def _path(name: str) -> Path:
    return folder() / name[:2] / f"{name}.json"
