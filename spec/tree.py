"""A recipe as a tree in which every key and value has a position."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from recipec.spec.core_schema import Value
from recipec.spec.diagnostics import Span
from recipec.spec.key_paths import Part


@dataclass(frozen=True)
class Provenance:
    """The position of a node; kind is "file", "extends" or "set"."""

    kind: str
    span: Span


@dataclass(frozen=True)
class Scalar:
    """A single value.

    Attributes:
        plain: whether it is written without quotes.
        unread: whether it replaces a value that was refused.
    """

    value: Value
    place: Provenance
    plain: bool = True
    unread: bool = False


@dataclass(frozen=True)
class Items:
    """A list."""

    items: list[Node]
    place: Provenance


@dataclass(frozen=True)
class Entry:
    """The position of a key, and its value."""

    key: Provenance
    node: Node


@dataclass(frozen=True)
class Mapping:
    """Keys and values, in order."""

    entries: dict[str, Entry]
    place: Provenance


Node = Scalar | Items | Mapping


def plain(node: Node) -> Any:
    """Convert the tree to dicts, lists and values."""
    if isinstance(node, Mapping):
        return {key: plain(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [plain(item) for item in node.items]
    return node.value


def walk(
    node: Node, path: tuple[Part, ...] = (), key: Provenance | None = None
) -> Iterator[tuple[tuple[Part, ...], Provenance | None, Node]]:
    """Yield every node with its path, and the position of its key if it has one."""
    yield path, key, node
    if isinstance(node, Mapping):
        for name, entry in node.entries.items():
            yield from walk(entry.node, (*path, name), entry.key)
    elif isinstance(node, Items):
        for index, item in enumerate(node.items):
            yield from walk(item, (*path, index))


def merge(base: Node, over: Node) -> Node:
    """Merge two trees. Mappings are merged key by key, and `over` wins; other nodes are replaced."""
    if not (isinstance(base, Mapping) and isinstance(over, Mapping)):
        return over
    entries = dict(base.entries)
    for key, entry in over.entries.items():
        old = entries.get(key)
        entries[key] = Entry(entry.key, merge(old.node, entry.node)) if old else entry
    return Mapping(entries, over.place)
