"""Data that lies elsewhere on the source's machine: a recipe names a place below its own folder for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path, PurePosixPath

from compiler.port.ledger import Ledger, Verdict
from compiler.port.mesh import amend
from compiler.sources import escapes

FOLDER = "data"
"""Where copies are to be put, beside the recipe."""


def place(ledger: Ledger, folder: Path) -> None:
    """Gives each source that an artifact cannot reach a path that it can, and says what is to be put there.

    Args:
        folder: of the recipe.
    """
    taken: dict[str, str] = {}
    for path in ("data.train", "data.eval"):
        given = ledger.value(path)
        if not isinstance(given, list):
            continue
        notes = []
        made = []
        for entry in given:
            text = entry.get("path") if isinstance(entry, Mapping) else entry
            if isinstance(text, str) and escapes(text):
                below = _below(text, folder) or taken.setdefault(text, _free(text, taken.values()))
                notes += [f"put a copy of {text} beside the recipe, as {below}"] if text in taken else []
                entry = {**entry, "path": below} if isinstance(entry, Mapping) else below
            made.append(entry)
        note = "; ".join(dict.fromkeys(notes))
        if made != given:
            ledger.set(path, made, "; ".join(filter(None, (ledger.lines[path].comment, note))))
        if note:
            amend(ledger, path, Verdict.EXACT, note)


def _below(text: str, folder: Path) -> str:
    """The path from the recipe's folder, "" where it does not lie there."""
    full, home = Path(folder, Path(text).expanduser()).resolve(), folder.resolve()
    return full.relative_to(home).as_posix() if full != home and full.is_relative_to(home) else ""


def _free(text: str, taken: Collection[str]) -> str:
    """A name in FOLDER that no other source has."""
    name = PurePosixPath(text.replace("\\", "/")).name.strip("~. ") or "train"
    stem, dot, ends = name.partition(".")
    for number in count(2):
        if f"{FOLDER}/{name}" not in taken:
            break
        name = f"{stem}-{number}{dot}{ends}"
    return f"{FOLDER}/{name}"
