"""Where each value of a recipe comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from recipec.spec import paths
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.paths import Part
from recipec.spec.tree import Items, Mapping, Node, Provenance, Scalar


@dataclass(frozen=True)
class Origin:
    """Where a value comes from.

    Attributes:
        kind: "default", "file" (the recipe itself), "extends" (a file it takes over) or "set".
        file, line, column: as in Span; None for a default.
        text: the source line, "" for a default.
    """

    kind: str
    file: str | None = None
    line: int | None = None
    column: int | None = None
    text: str = ""

    def __str__(self) -> str:
        if self.kind == "default":
            return "default"
        if self.kind == "set":
            return f"--set {self.text}"
        return f"{self.file}:{self.line}"


class Sources:
    """The recipe's tree with positions, after `extends` and `--set`.

    Args:
        root: the tree, None when the file could not be read.
        conceal: hides what looks like a secret in a text that is shown.
    """

    def __init__(self, root: Mapping | None, conceal: Callable[[str], str] = lambda text: text) -> None:
        self.root = root
        self.conceal = conceal

    def _find(self, parts: tuple[Part, ...]) -> tuple[int, Node | None, Provenance | None]:
        """The deepest node on the way: how many parts lead there, the node, and its key's place."""
        node: Node | None = self.root
        key: Provenance | None = None
        for depth, part in enumerate(parts):
            if isinstance(node, Mapping) and isinstance(part, str) and part in node.entries:
                key, node = node.entries[part].key, node.entries[part].node
            elif isinstance(node, Items) and isinstance(part, int) and 0 <= part < len(node.items):
                key, node = None, node.items[part]
            else:
                return depth, node, key
        return len(parts), node, key

    def span(self, path: str, key: bool = False) -> Span | None:
        """The place of a value, or of its key; of its nearest present ancestor when it is not given.

        A list or mapping that starts on another line than its key has its key's place.
        """
        try:
            parts = paths.split(path)
        except ValueError:
            parts = ()
        depth, node, key_place = self._find(parts)
        if node is None:
            return None
        absent = depth < len(parts)
        at_key = key or self._below(node, key_place) or (absent and not isinstance(node, Scalar))
        place = key_place if key_place is not None and at_key else node.place
        return replace(place.span, text=self.conceal(place.span.text))

    @staticmethod
    def _below(node: Node, key: Provenance | None) -> bool:
        return key is not None and not isinstance(node, Scalar) and node.place.span.line != key.span.line

    def origin(self, path: str) -> Origin:
        """Where the value at a path comes from: a default when no file and no --set gives it."""
        try:
            parts = paths.split(path)
        except ValueError:
            return Origin("default")
        depth, node, key_place = self._find(parts)
        named_source = isinstance(node, Scalar) and isinstance(node.value, str) and parts[depth:] == ("path",)
        if node is None or (depth < len(parts) and not named_source):
            return Origin("default")
        place = key_place if key_place and self._below(node, key_place) else node.place
        span = place.span
        return Origin(place.kind, span.file, span.line, span.column, self.conceal(span.text))


def locate(diagnostics: Iterable[Diagnostic], sources: Sources) -> list[Diagnostic]:
    """The same diagnostics, with the places that their paths lead to."""
    return [d if d.span is not None else replace(d, span=sources.span(d.path, d.at_key)) for d in diagnostics]
