"""The recipe's diagnostics as the protocol has them, with what repairs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lsprotocol import types

from compiler.lsp.analysis import Place, PlacedDiagnostic
from compiler.lsp.outline import Entry, Outline
from compiler.lsp.pages import Pages
from compiler.lsp.scan import scan
from compiler.lsp.text import Text
from compiler.wording import flow
from spec.codes import CODES
from spec.paths import Part, split

SEVERITIES = {
    "error": types.DiagnosticSeverity.Error,
    "warning": types.DiagnosticSeverity.Warning,
    "note": types.DiagnosticSeverity.Information,
}

_MEANT = re.compile(r"did you mean `([^`]+)`\?")
_PASTED = re.compile(r"(?:without quotes: |put quotes around it: )?`([^`\n]+)`")
_LINE = re.compile(r"\w+: (?:[^\s,;:{}\[\]]+|\{[^{}]*\}|\[[^\[\]]*\])")
"""A help that is one line of a recipe and nothing else."""


@dataclass(frozen=True)
class Fix:
    """A repair: what it does, in words, and the edit."""

    title: str
    start: int
    end: int
    text: str


@dataclass(frozen=True)
class Shown:
    """A diagnostic as it is shown, and its repair."""

    diagnostic: types.Diagnostic
    fix: Fix | None


def show(
    diagnostics: list[PlacedDiagnostic], path: str, text: Text, pages: Pages | None, related: bool = True
) -> list[Shown]:
    """The diagnostics of a document.

    Args:
        path: the document's file, absolute.
        text: its text.
        pages: where codes are described; None for no link.
        related: whether the editor shows other places beside a diagnostic.
    """
    outline = scan(text.source)
    return [_shown(diagnostic, path, text, outline, pages, related) for diagnostic in diagnostics]


def _shown(
    diagnostic: PlacedDiagnostic, path: str, text: Text, outline: Outline, pages: Pages | None, related: bool
) -> Shown:
    place, others, fix = diagnostic.place, None, None
    message = (
        diagnostic.message if diagnostic.help is None else f"{diagnostic.message}\nhelp: {diagnostic.help}"
    )
    if place is None:
        start, end = _line(text, 0)
    elif place.file == path:
        start, end = extent(place, text)
        fix = _fix(diagnostic, start, end, text, outline)
    else:
        # It lies in a file that this one extends: said where that is named.
        start, end = next((e.value for e in outline.entries if e.path == ("extends",)), _line(text, 0))
        found = types.Location(Path(place.file).as_uri(), range_in_file(place))
        others = [types.DiagnosticRelatedInformation(found, diagnostic.message)] if related else None
        message = f"in {Path(place.file).name}, line {place.line + 1}: {message}"
    return Shown(
        types.Diagnostic(
            range=range_of(text, start, end),
            message=message,
            severity=SEVERITIES[diagnostic.severity],
            code=diagnostic.code,
            code_description=types.CodeDescription(pages.of(diagnostic.code)) if pages else None,
            source="recipe",
            related_information=others,
        ),
        fix,
    )


def range_of(text: Text, start: int, end: int) -> types.Range:
    return types.Range(types.Position(*text.position(start)), types.Position(*text.position(end)))


def extent(place: Place, text: Text) -> tuple[int, int]:
    """A place's start and end in the text; at least a character where the line has one."""
    start = text.yaml_offset(place.line, place.column)
    end = text.yaml_offset(place.line, place.column + max(1, place.length))
    first = text.yaml_offset(place.line, 0)
    return (start, end) if end > start else (max(first, start - 1), end)


def range_in_file(place: Place) -> types.Range:
    """The range of a place in a file that is not open, or on disk."""
    try:
        text = Text(Path(place.file).read_bytes().decode("utf-8", "replace"))
    except OSError:
        text = Text("")
    start, end = extent(place, text)
    return range_of(text, start, end)


def _line(text: Text, line: int) -> tuple[int, int]:
    return text.yaml_offset(line, 0), text.line_end(line)


def _fix(diagnostic: PlacedDiagnostic, start: int, end: int, text: Text, outline: Outline) -> Fix | None:
    """What the help says to write, as an edit."""
    help = diagnostic.help or ""
    try:
        parts = split(diagnostic.path)
    except ValueError:
        return None
    if meant := _MEANT.search(help):
        return Fix(f"Change to `{meant[1]}`", start, end, flow(meant[1]))
    entry = next((e for e in outline.entries if e.path == parts), None)
    if diagnostic.code == "E0102" and parts and "\n" not in help:
        return _added(parts, help, text, outline)
    pasted = _PASTED.fullmatch(help)
    line = pasted[1] if pasted else help if _LINE.fullmatch(help) else None
    if line is not None and entry is not None:
        name = parts[-1]
        value = line.removeprefix(f"{name}: ") if isinstance(name, str) else line
        if (entry.key is None and pasted) or value != line:
            return Fix(f"Change to `{line}`", *entry.value, value)
    if help.startswith("remove the line") and entry is not None:
        return _removed(entry, text)
    return None


def _added(parts: tuple[Part, ...], line: str, text: Text, outline: Outline) -> Fix | None:
    """A key that is missing, put below the last one of its section."""
    section = parts[:-1]
    beside = [entry for entry in outline.below(section) if entry.key and not entry.flow]
    if not beside:
        return None
    start = text.source.rfind("\n", 0, beside[0].key[0] if beside[0].key else 0) + 1
    indent = " " * ((beside[0].key[0] if beside[0].key else 0) - start)
    last = max(entry.value[1] for entry in beside)
    at = text.line_end(text.position(last)[0])
    return Fix(f"Add `{line}`", at, at, f"\n{indent}{line}")


def _removed(entry: Entry, text: Text) -> Fix | None:
    """A key with its value, when they have their line to themselves."""
    if entry.key is None or entry.flow or entry.open:
        return None
    line = text.position(entry.key[0])[0]
    start, end = text.offset((line, 0)), text.line_end(line)
    if text.position(entry.value[1])[0] != line or text.source[start : entry.key[0]].strip():
        return None
    return Fix("Remove the line", start, text.offset((line + 1, 0)), "") if end >= start else None


def described(code: str) -> str:
    """What a code stands for, as Markdown."""
    entry = CODES[code]
    return f"**{code}: {entry.title}**\n\n{entry.cause}\n\n{entry.cure}"
