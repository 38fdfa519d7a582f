"""Changes of a recipe's tree: what is moved keeps its place in the text that it was read from."""

from __future__ import annotations

from typing import Any

from spec.paths import Part
from spec.tree import Entry, Items, Mapping, Node, Place, Scalar

Path = tuple[Part, ...]


def find(root: Node, where: Path) -> Node | None:
    """The node at a path."""
    node: Node | None = root
    for part in where:
        if isinstance(node, Mapping) and part in node.entries:
            node = node.entries[str(part)].node
        elif isinstance(node, Items) and isinstance(part, int) and part < len(node.items):
            node = node.items[part]
        else:
            return None
    return node


def take(root: Mapping, where: Path) -> Entry:
    """Removes a key that is there."""
    parent = find(root, where[:-1])
    assert isinstance(parent, Mapping)
    return parent.entries.pop(str(where[-1]))


def put(root: Mapping, where: Path, entry: Entry) -> None:
    """Sets a key, in sections that are made where they are missing."""
    node: Node = root
    for depth, part in enumerate(where[:-1]):
        if isinstance(node, Mapping):
            node = node.entries.setdefault(str(part), Entry(entry.key, Mapping({}, entry.key))).node
        else:
            below = find(root, where[: depth + 1])
            assert below is not None
            node = below
    assert isinstance(node, Mapping)
    node.entries[str(where[-1])] = entry


def replace(root: Mapping, where: Path, node: Node) -> None:
    """Gives a key or an item that is there another value."""
    parent = find(root, where[:-1])
    if isinstance(parent, Items):
        parent.items[int(where[-1])] = node
    elif isinstance(parent, Mapping):
        parent.entries[str(where[-1])] = Entry(parent.entries[str(where[-1])].key, node)


def move(root: Mapping, old: Path, new: Path) -> None:
    """Gives a key that is there another path."""
    put(root, new, take(root, old))


def node_of(value: Any, place: Place) -> Node:
    """A plain value as a tree, all of it at one place."""
    if isinstance(value, dict):
        return Mapping({key: Entry(place, node_of(item, place)) for key, item in value.items()}, place)
    if isinstance(value, list):
        return Items([node_of(item, place) for item in value], place)
    return Scalar(value, place)
