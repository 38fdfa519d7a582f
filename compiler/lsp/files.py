"""Files that a recipe can name, as far as one is typed, and the functions of one."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

MOST = 500
"""Entries of a folder that are looked at."""


def beside(
    folder: Path, typed: str, endings: Iterable[str], checkpoints: bool = False
) -> Iterator[tuple[str, bool]]:
    """What lies where a typed path leads to, and whether the path can go on there: folders, and some files.

    Args:
        folder: of the recipe.
        endings: of the files' names.
        checkpoints: whether a checkpoint's folder is what is looked for.
    """
    above = typed.rpartition("/")[0]
    if "://" in typed:
        return
    lead = f"{above}/" if "/" in typed else "./" if checkpoints else ""
    try:
        place = folder / Path(above or ("/" if typed.startswith("/") else ".")).expanduser()
        for entry in sorted(itertools.islice(place.iterdir(), MOST), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                ready = checkpoints and (entry / "config.json").is_file()
                yield f"{lead}{entry.name}" + ("" if ready else "/"), not ready
            elif entry.name.endswith(tuple(endings)):
                yield f"{lead}{entry.name}", False
    except (OSError, ValueError, RuntimeError):
        return


def functions(path: Path) -> list[ast.FunctionDef]:
    """The functions at the top of a Python file; none where it cannot be read."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return []
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]
