"""Answers about a recipe that an editor holds: diagnostics, repairs, explanations, the base."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from recipec.compiler.explain.explain import explain as explained
from recipec.compiler.explain.explain import unknown_path
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lsp.process import Checked, EditorDocument, Fix, Position
from recipec.compiler.pages import text
from recipec.spec import recipe_edits
from recipec.spec.core_schema import flow
from recipec.spec.diagnostics import Diagnostic, Span, accepted
from recipec.spec.key_paths import Part, join, split
from recipec.spec.load import E0003, MAX_BYTES, Loaded, display, extended, load
from recipec.spec.tree import Node, Provenance, Scalar, walk
from recipec.spec.validate import E0102
from recipec.spec.yaml_document import LINE_BREAK

_MEANT = re.compile(r"did you mean `([^`]+)`\?")
_PASTED = re.compile(r"(?:without quotes: |put quotes around it: )?`([^`\n]+)`")
_LINE = re.compile(r"\w+: (?:[^\s,;:{}\[\]]+|\{[^{}]*\}|\[[^\[\]]*\])")
"""Matches a help that consists of one line of a recipe."""


def ready() -> None:
    """Do nothing; a call only makes the process import this module."""


def check(document: EditorDocument) -> Checked:
    """Return the diagnostics of `recipe check` for the text that the editor holds."""
    global _last
    _last = None  # the files next to the recipe may have changed
    too_large = _too_large(document)
    if too_large is not None:
        return Checked([(too_large, None)])
    loaded, lowered = _read(document)
    text = _Text(document, loaded)
    extends = next((node.place.span for path, _, node in text.own if path == ("extends",)), None)
    spans = [place.span for _, place, _ in _walked(loaded)] + [d.span for d in lowered.diagnostics if d.span]
    bases = {os.path.abspath(span.file) for span in spans} - {document.path}
    shown = [
        (diagnostic, text.fix(diagnostic)) for diagnostic in lowered.diagnostics if not accepted(diagnostic)
    ]
    return Checked(shown, extends, frozenset(bases))


def explain(document: EditorDocument, at: Position) -> tuple[str, Span] | None:
    """Return what `recipe explain` says of the key or value at a position; None if the recipe has errors."""
    target = _found(document, at)
    if target is None:
        return None
    path, span = target
    loaded, lowered = _read(document)
    while path and unknown_path(join(path), loaded):  # an item of a list that is one value
        path = path[:-1]
    if lowered.program is None or not path:
        return None
    return text.write(explained(lowered.program, loaded, join(path))), span


def base(document: EditorDocument, at: Position) -> Span | None:
    """Return where the base sets the value at a position; for `extends`, the start of the base."""
    innermost = _found(document, at)
    root = _read(document)[0].sources.root if innermost else None
    if innermost is None or root is None:
        return None
    target, _ = extended(root, (Path(document.path),))
    if target is None or innermost[0] == ("extends",):
        return Span(str(target), 1, 1, "", 0) if target is not None else None
    text = document.unsaved.get(os.path.abspath(target))
    origin = load(target, text=text, unsaved=document.unsaved).sources.origin(join(innermost[0]))
    if origin.file is None or origin.line is None or origin.column is None:
        return None
    return Span(origin.file, origin.line, origin.column, origin.text)


_last: tuple[EditorDocument, Loaded, Lowered] | None = None


def _read(document: EditorDocument) -> tuple[Loaded, Lowered]:
    """Load and lower the recipe. The last result is kept for further questions about it."""
    global _last
    if _last is None or _last[0] != document:
        loaded = load(Path(document.path), text=document.text, unsaved=document.unsaved)
        _last = (document, loaded, lower(loaded))
    return _last[1], _last[2]


def _walked(loaded: Loaded) -> Iterator[tuple[tuple[Part, ...], Provenance, Node]]:
    """Yield every node of a recipe and its bases: path, position of its key (or its own), and the node."""
    if loaded.sources.root is not None:
        for path, key, node in walk(loaded.sources.root):
            yield path, key or node.place, node


def _found(document: EditorDocument, at: Position) -> tuple[tuple[Part, ...], Span] | None:
    """Return the path and extent of the innermost key or value at a position of the document's own text."""
    innermost = None
    if _too_large(document) is None:
        for path, place, node in _Text(document, _read(document)[0]).own:
            for span in (place.span, node.place.span) if isinstance(node, Scalar) else (place.span,):
                start, end = span.column - 1, span.column - 1 + max(1, span.length)
                if path and span.line - 1 == at[0] and start <= at[1] <= end:
                    innermost = path, span
    return innermost


def _too_large(document: EditorDocument) -> Diagnostic | None:
    size = len(document.text.encode("utf-8", "surrogatepass"))
    if size <= MAX_BYTES:
        return None
    name = display(Path(document.path))
    message = f"{name} has {size:,} bytes; a recipe has at most {MAX_BYTES:,}"
    return Diagnostic(E0003, message, help="is it a recipe?", span=Span(name, 1, 1, ""))


class _Text:
    """A recipe's own text: its lines, its keys and values, and how to repair it."""

    def __init__(self, document: EditorDocument, loaded: Loaded) -> None:
        self.name = display(loaded.path)
        self.lines = LINE_BREAK.split(document.text)
        self.own = [entry for entry in _walked(loaded) if entry[1].span.file == self.name]

    def fix(self, diagnostic: Diagnostic) -> Fix | None:
        """Return the edit that a diagnostic's help suggests."""
        span, help = diagnostic.span, diagnostic.help or ""
        try:
            path = split(diagnostic.path)
        except ValueError:
            return None
        if span is None or span.file != self.name:
            return None
        number, start = span.line - 1, span.column - 1
        if meant := _MEANT.search(help):
            replaced = (number, start), (number, start + span.length)
            return Fix(f"Change to `{meant[1]}`", *replaced, flow(meant[1]))
        if diagnostic.code == E0102 and path and "\n" not in help:
            return self._added(path, help)
        place, node = next(((place, node) for where, place, node in self.own if where == path), (None, None))
        if place is None or node is None or not recipe_edits.on_one_line(node, self.lines):
            return None
        key, value = place.span, node.place.span
        number, start, end = value.line - 1, value.column - 1, value.column - 1 + value.length
        pasted = _PASTED.fullmatch(help)
        line = pasted[1] if pasted else help if _LINE.fullmatch(help) else None
        if line is not None:
            text = line.removeprefix(f"{path[-1]}: ")
            if text != line or (pasted and isinstance(path[-1], int)):
                return Fix(f"Change to `{line}`", (number, start), (number, end), text)
        alone = key.line == value.line and not self.lines[number][: key.column - 1].strip()
        if help.startswith("remove the line") and alone and self.lines[number][end:].strip()[:1] in "#":
            return Fix("Remove the line", (number, 0), (number + 1, 0), "")
        return None

    def _added(self, path: tuple[Part, ...], line: str) -> Fix | None:
        section = next((node.place.span for where, _, node in self.own if where == path[:-1]), None)
        keys = [place.span for where, place, _ in self.own if where and where[:-1] == path[:-1]]
        if section is None or not keys:
            return None
        edit = recipe_edits.added(section, keys, line, self.lines)
        return Fix(f"Add `{line}`", edit.start, edit.end, edit.text)
