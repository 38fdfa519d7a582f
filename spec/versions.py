"""The versions of the language: which one is read, and what is said of a file of another one."""

from __future__ import annotations

import shlex

from spec.diagnostics import Diagnostic
from spec.tree import Mapping, Scalar

VERSION = 1
"""The version of the language that this compiler reads; `recipe upgrade` takes every older one to it."""

KEY = "recipe"
"""The key that says a file's version, in every version of the language."""

UPDATE = (
    "update recipec: `git pull` and `make .venv` in its clone, or `pipx install --force` of a newer wheel"
)
"""The help for a file that only a later compiler reads."""


def stated(root: Mapping) -> int | None:
    """The version that a file says it is of; None when it says none, or what is no version."""
    entry = root.entries.get(KEY)
    value = entry.node.value if entry is not None and isinstance(entry.node, Scalar) else None
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 1 else None


def other(root: Mapping) -> list[Diagnostic]:
    """What is said of a file of another version than the one that is read; nothing of one that says none."""
    version = stated(root)
    if version is None or version == VERSION:
        return []
    place = root.entries[KEY].node.place
    if place.kind == "set":
        message = f"`recipe` is set to {version}: this compiler reads version {VERSION} of the language"
        return [Diagnostic("E0108", message, KEY, "leave it out: a file says its own version", place.span)]
    message = f"this file is of version {version} of the language: this compiler reads version {VERSION}"
    if version > VERSION:
        return [Diagnostic("E0108", message, KEY, UPDATE, place.span)]
    return [Diagnostic("E1235", message, KEY, f"recipe upgrade {_quoted(place.span.file)}", place.span)]


def _quoted(file: str) -> str:
    """The file as a shell and the command line take it."""
    return shlex.quote(f"./{file}" if file.startswith("-") else file)
