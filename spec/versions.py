"""The version of the language that this compiler reads, and the diagnostic for files of a later version."""

from __future__ import annotations

from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.tree import Mapping, Scalar

VERSION = 1
"""The version of the language that this compiler reads. It is the first version."""

KEY = "recipe"
"""The key that holds a file's version, in every version of the language."""

UPDATE = (
    "update recipec: `git pull` and `make .venv` in its clone, or `pipx install --force` of a newer wheel"
)
"""The help for a file that only a later compiler can read."""


E0108 = Code(
    "E0108",
    "unknown version of the language",
    cause="The key `recipe` gives the version of the language. This compiler reads version 1.",
    cure="Write `recipe: 1`. If the recipe has a later version, update recipec.",
)


def newer(root: Mapping) -> list[Diagnostic]:
    """Return the diagnostic for a file of a later version; nothing for other files."""
    entry = root.entries.get(KEY)
    version = entry.node.value if entry is not None and isinstance(entry.node, Scalar) else None
    if entry is None or not isinstance(version, int) or version <= VERSION:
        return []
    place = entry.node.place
    if place.kind == "set":
        message = f"`recipe` is set to {version}: this compiler reads version {VERSION} of the language"
        return [Diagnostic(E0108, message, KEY, "leave it out: a file says its own version", place.span)]
    message = f"this file is of version {version} of the language: this compiler reads version {VERSION}"
    return [Diagnostic(E0108, message, KEY, UPDATE, place.span)]
