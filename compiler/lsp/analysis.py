"""What is said of a recipe whose text an editor holds: `recipe check`'s diagnostics and `recipe explain`.

It runs in the process of `worker.py`; everything taken and given is plain, so that it can be sent there.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compiler.lower import Lowered
    from spec.diagnostics import Diagnostic
    from spec.load import Loaded
    from spec.sources import Origin


@dataclass(frozen=True)
class Document:
    """A recipe as the editor has it.

    Attributes:
        path: absolute.
        text: its content.
        unsaved: contents of other open documents, by absolute path.
    """

    path: str
    text: str
    unsaved: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """A place in a file.

    Attributes:
        file: absolute path.
        line, column: from 0, as YAML counts them.
        length: in characters.
    """

    file: str
    line: int
    column: int
    length: int = 1


@dataclass(frozen=True)
class PlacedDiagnostic:
    """A diagnostic with its place; None where it has none."""

    code: str
    severity: str
    message: str
    help: str | None
    path: str
    place: Place | None


@dataclass(frozen=True)
class Analysis:
    """What a check gave.

    Attributes:
        diagnostics: in the order of `recipe check`.
        raw: the recipe with what it extends, as plain values; {} when it cannot be read.
        bases: absolute paths of the files that it extends.
    """

    diagnostics: list[PlacedDiagnostic]
    raw: dict[str, Any]
    bases: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """What `recipe explain` says of a path.

    Attributes:
        origin: "default", "file" or "extends"; None when it cannot be told.
        place: where the value stands; None for a default.
        value: as it could stand in a recipe; None when the recipe has errors, or for a section.
        lines: what it turns into; none when the recipe has errors.
    """

    origin: str | None
    place: Place | None
    value: str | None
    lines: list[str]


def check(document: Document) -> Analysis:
    """The diagnostics of `recipe check`, of the text that the editor holds."""
    too_large = _too_large(document)
    if too_large is not None:
        return Analysis([_placed(too_large)], {}, ())
    loaded, lowered = _read(document)
    return Analysis([_placed(d) for d in lowered.diagnostics], loaded.raw, tuple(_bases(document)))


def explain(document: Document, path: str) -> Explanation | None:
    """What there is to say about a section or key; None for no path of a recipe that can be read."""
    from compiler.explain import detail, leaves, unknown_path
    from compiler.wording import flow
    from spec.paths import split

    if _too_large(document) is not None:
        return None
    loaded, lowered = _read(document)
    origin = loaded.sources.origin(path)
    place = _place_of(origin)
    if lowered.program is None or unknown_path(path, loaded) is not None:
        return Explanation(origin.kind if place else None, place, None, [])
    parts = split(path)
    values = [value for found, value in leaves(lowered.program.recipe) if found == parts]
    return Explanation(
        origin.kind, place, flow(values[0]) if values else None, list(detail(parts, lowered.program))
    )


def inherited(document: Document, path: str) -> Place | None:
    """Where a file that the recipe extends gives the value at a path."""
    from spec.load import load

    for base in _bases(document):
        loaded = load(Path(base), text=document.unsaved.get(base), unsaved=document.unsaved)
        place = _place_of(loaded.sources.origin(path))
        if place is not None:
            return place
    return None


_last: tuple[Document, Loaded, Lowered] | None = None


def _read(document: Document) -> tuple[Loaded, Lowered]:
    """The recipe, loaded and lowered; the last one is kept for what is asked about it next."""
    global _last
    from compiler.lower import lower
    from spec.load import load

    if _last is None or _last[0] != document:
        loaded = load(Path(document.path), text=document.text, unsaved=document.unsaved)
        _last = (document, loaded, lower(loaded))
    return _last[1], _last[2]


def forget() -> None:
    """The files beside the recipe may have changed: what is kept is read again."""
    global _last
    _last = None


def _bases(document: Document) -> Iterator[str]:
    """The files that the recipe extends, the nearest first."""
    from spec.document import read
    from spec.load import read_text
    from spec.tree import Mapping, Scalar

    path, text = document.path, document.text
    seen = {path}
    while True:
        root = read(text, path).root
        entry = root.entries.get("extends") if isinstance(root, Mapping) else None
        name = entry.node.value if entry is not None and isinstance(entry.node, Scalar) else None
        if not isinstance(name, str) or not name.strip() or name.startswith(("/", "~")) or "\0" in name:
            return
        path = os.path.normpath(os.path.join(os.path.dirname(path), name))
        if path in seen:
            return
        seen.add(path)
        yield path
        if path in document.unsaved:
            text = document.unsaved[path]
        else:
            text, problem = read_text(Path(path))
            if problem is not None:
                return


def _too_large(document: Document) -> Diagnostic | None:
    from spec.diagnostics import Diagnostic, Span
    from spec.load import MAX_BYTES, display

    size = len(document.text.encode("utf-8", "surrogatepass"))
    if size <= MAX_BYTES:
        return None
    name = display(Path(document.path))
    message = f"{name} has {size:,} bytes; a recipe has at most {MAX_BYTES:,}"
    return Diagnostic("E0003", message, help="is it a recipe?", span=Span(name, 1, 1, ""))


def _placed(d: Diagnostic) -> PlacedDiagnostic:
    span = d.span
    place = None
    if span is not None:
        place = Place(os.path.abspath(span.file), span.line - 1, span.column - 1, span.length)
    return PlacedDiagnostic(d.code, d.severity, d.message, d.help, d.path, place)


def _place_of(origin: Origin) -> Place | None:
    if origin.file is None or origin.line is None or origin.column is None:
        return None
    return Place(os.path.abspath(origin.file), origin.line - 1, origin.column - 1)
