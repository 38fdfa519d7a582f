"""Files that a ported recipe needs beside it, such as the module of its `data.transform`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from spec.diagnostics import Diagnostic
from spec.load import display


def in_the_way(files: Mapping[str, str], folder: Path, writes: bool, force: bool) -> Iterator[Diagnostic]:
    """What keeps the files from being put there: errors, or a warning where the recipe goes to stdout.

    Args:
        folder: of the recipe.
        writes: whether the recipe goes to a file at all.
        force: whether what is there may be replaced.
    """
    for name, content in files.items():
        if not writes:
            message = (
                f"the recipe needs {name} beside it, which is not written where the recipe goes to stdout"
            )
            yield Diagnostic("W1119", message, help="-o recipe.yaml writes both")
        elif not force and _content(folder / name) not in (None, content):
            message = (
                f"{display(folder / name)} is there already, and the recipe needs another one of that name"
            )
            yield Diagnostic("E1112", message, help="--force replaces it; or give -o another folder")


@contextmanager
def in_place(files: Mapping[str, str], folder: Path, force: bool) -> Iterator[None]:
    """Puts the files there while the recipe is checked, and takes them away again.

    Args:
        force: whether what is there may be replaced for that while.
    """
    before: dict[Path, str | None] = {}
    try:
        for name, content in files.items():
            path = folder / name
            present = _content(path)
            if present is None or (force and present != content):
                before[path] = present
                path.write_text(content, encoding="utf-8")
        yield
    finally:
        for path, present in before.items():
            if present is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(present, encoding="utf-8")


def _content(path: Path) -> str | None:
    """A file's text, None where there is no such file."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None
