"""Emit .gitignore: the files that the artifact's scripts write and that should not be committed."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from recipec.compiler.artifacts.artifact import IGNORE
from recipec.compiler.emitters.baseline import checkpoint_folder
from recipec.compiler.render import render

if TYPE_CHECKING:
    from recipec.compiler.lowering.backend import Backend
    from recipec.compiler.lowering.program import Program


def emit_ignored(program: Program, files: Iterable[str], backends: Sequence[Backend] = ()) -> str:
    """Return the text of .gitignore.

    Args:
        files: the artifact's own files, by path relative to it. None of them is ignored.
        backends: the backends besides Tunix that the artifact is built for.
    """
    files_of_artifact = [PurePosixPath(path).parts for path in (*files, IGNORE)]
    folders = sorted({*_left(program, backends)})
    entries = ["/probe.json"] if "probe.py" in files else []
    lines = [
        "__pycache__/",
        *entries,
        *(line for folder in folders for line in _lines(folder, files_of_artifact)),
    ]
    return render("gitignore", lines=lines)


def _left(program: Program, backends: Sequence[Backend]) -> Iterator[str]:
    """Yield the folders that the scripts create when called without options."""
    recipe = program.recipe
    checkpoints, merged = recipe.checkpoint.directory.rstrip("/"), recipe.merge.output.rstrip("/")
    folders = [checkpoints, merged, f"{merged}-adapter", recipe.cache.directory or "", "logs"]
    if backends:
        folders += [f"{checkpoints}-torchax", checkpoint_folder(recipe)]
        folders += ["adapter", ".adapter.partial", "model", ".model.partial"]
    if recipe.serve is not None:
        folders.append("results")
    return (posixpath.normpath(folder) for folder in folders if folder and "://" not in folder)


def _lines(folder: str, kept: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield the patterns that ignore a folder, except for the artifact's own files in it."""
    parts = PurePosixPath(folder).parts
    within = {path[len(parts)] for path in kept if path[: len(parts)] == parts and len(path) > len(parts)}
    yield f"{_pattern(folder)}/{'*' if within else ''}"
    yield from (f"!{_pattern(folder)}{_pattern(name)}" for name in sorted(within))


def _pattern(path: str) -> str:
    """Return git's pattern for a path relative to the artifact's folder."""
    return "/" + re.sub(r"([\\*?\[]| $)", r"\\\1", path)
