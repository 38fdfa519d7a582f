"""Where an editor goes from a place of a recipe: files that it names, and what the extended ones give."""

from __future__ import annotations

from pathlib import Path

from lsprotocol import types

from compiler import catalog
from compiler.lsp.diagnostics import range_of
from compiler.lsp.files import functions
from compiler.lsp.outline import Entry, Outline, value_of
from compiler.lsp.text import Text

START = types.Range(types.Position(0, 0), types.Position(0, 0))


def file_named(entry: Entry, outline: Outline, folder: Path) -> types.Location | None:
    """The file that a value names, where it is there: for a transform, the line of its function."""
    names = tuple(part for part in entry.path if isinstance(part, str))
    value = value_of(outline.source[slice(*entry.value)]) if not entry.open else None
    if not isinstance(value, str) or "://" in value or not value.strip():
        return None
    if names == ("data", "transform"):
        return _function(folder, value)
    if names == ("model", "id") and catalog.is_directory(value):
        value = f"{value}/config.json"
    elif names not in FILES:
        return None
    return _location(folder, value)


FILES = frozenset(
    {
        ("extends",),
        ("data", "train"),
        ("data", "train", "path"),
        ("data", "eval"),
        ("data", "eval", "path"),
        ("data", "chat_template"),
        ("evaluate", "prompts"),
    }
)
"""Paths whose values name files."""


def _location(folder: Path, name: str, range: types.Range = START) -> types.Location | None:
    try:
        path = (folder / Path(name).expanduser()).absolute()
        return types.Location(path.resolve().as_uri(), range) if path.is_file() else None
    except (OSError, ValueError, RuntimeError):
        return None


def _function(folder: Path, value: str) -> types.Location | None:
    file, _, name = value.partition(":")
    for function in functions(folder / file):
        if function.name == name:
            text = Text((folder / file).read_text(encoding="utf-8", errors="replace"))
            start = text.offset((function.lineno - 1, function.col_offset))
            return _location(folder, file, range_of(text, start, start + len("def ") + len(name)))
    return _location(folder, file)


def symbols(outline: Outline, text: Text) -> list[types.DocumentSymbol]:
    """The recipe's sections and keys as a tree."""
    top: list[types.DocumentSymbol] = []
    made: dict[tuple[object, ...], types.DocumentSymbol] = {}
    for entry in outline.entries:
        start = entry.key[0] if entry.key else entry.value[0]
        value = outline.source[slice(*entry.value)].strip()
        name = str(entry.path[-1]) if entry.key else f"[{entry.path[-1]}]"
        symbol = types.DocumentSymbol(
            name=name or '""',
            detail=value if value and not entry.open and "\n" not in value else None,
            kind=_kind(entry),
            range=range_of(text, start, max(start, entry.value[1])),
            selection_range=range_of(text, *(entry.key or (start, start))),
            children=[],
        )
        made[entry.path] = symbol
        above = made.get(entry.path[:-1])
        if above is None:
            top.append(symbol)
        else:
            above.children = [*(above.children or ()), symbol]
    return top


def _kind(entry: Entry) -> types.SymbolKind:
    if entry.open:
        return types.SymbolKind.Module
    return types.SymbolKind.Property if entry.key else types.SymbolKind.String
