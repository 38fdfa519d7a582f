"""Record where each value of a recipe comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from recipec.spec import key_paths
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.key_paths import Part
from recipec.spec.tree import Items, Mapping, Node, Provenance, Scalar


@dataclass(frozen=True)
class Origin:
    """The origin of a value.

    Attributes:
        kind: "default", "file" (the recipe itself), "extends" (a file that it extends) or "set".
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
        root: the tree, None if the file could not be read.
        conceal: hides likely secrets in a text for display.
    """

    def __init__(self, root: Mapping | None, conceal: Callable[[str], str] = lambda text: text) -> None:
        self.root = root
        self.conceal = conceal

    def _find(self, parts: tuple[Part, ...]) -> tuple[int, Node | None, Provenance | None]:
        """Return the deepest existing node on the path: parts to it, the node, its key's position."""
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
        """Return the position of a value or its key; of its nearest existing ancestor if it is not given.

        A list or mapping that starts on another line than its key gets its key's position.
        """
        try:
            parts = key_paths.split(path)
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
        """Return the origin of the value at a path: a default if no file and no --set gives it."""
        try:
            parts = key_paths.split(path)
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
    """Return the diagnostics with the positions of their paths."""
    return [d if d.span is not None else replace(d, span=sources.span(d.path, d.at_key)) for d in diagnostics]
