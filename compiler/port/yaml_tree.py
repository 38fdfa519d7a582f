"""YAML 1.1 as PyYAML's safe_load reads it, with the place of every key and value.

Anchors, aliases and merge keys are resolved. Two things differ on purpose: a number such as 1e-4, which
PyYAML takes for text, is the number that every tool then makes of it; and a date stays text.
"""

from __future__ import annotations

import re
from typing import Any, cast

import yaml
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from compiler.port.source import join
from compiler.port.tree import Tree, conceal
from spec.diagnostics import Span
from spec.document import MAX_DEPTH, Refused
from spec.yaml_errors import explain

_TAG = "tag:yaml.org,2002:"
_KNOWN = {
    f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "timestamp", "value", "map", "seq")
}
_MERGE = f"{_TAG}merge"
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")
_JINJA = re.compile(r"\{\{|\{%")
JINJA_HELP = "render the template first, and port what comes of it"
_START = "recipe port takes a config of the tool, such as its YAML file"


def parse(tree: Tree) -> Any:
    """The value of a YAML text; its places are left in the tree.

    Raises:
        Refused: it is no YAML, or holds what is not read.
    """
    try:
        loader = _Loader(tree)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        raise _bad_character(tree, error.position) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax(tree, error) from None
    except RecursionError:
        message = f"lists and mappings lie more than {MAX_DEPTH} deep"
        raise tree.refused("E0015", message, "is it a config?", tree.span(0, 0)) from None
    if root is None or (isinstance(root, ScalarNode) and root.tag == f"{_TAG}null"):
        raise tree.refused("E0005", "the file is empty", _START, tree.span(0, 0))
    return _Builder(tree, loader).value(root, "", 0)


class _Loader(yaml.SafeLoader):
    """PyYAML's own, but that the value of an alias has the alias's place, and depth is bounded."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree.text)
        self.tree = tree
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Node:
        event = self.peek_event()
        self.depth += 1
        if self.depth > MAX_DEPTH + 2:
            mark = event.start_mark
            message = f"lists and mappings lie more than {MAX_DEPTH} deep"
            raise self.tree.refused(
                "E0015", message, "is it a config?", self.tree.span(mark.line, mark.column)
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, AliasEvent) and isinstance(node, ScalarNode):
            return ScalarNode(node.tag, node.value, event.start_mark, event.end_mark, style=node.style)
        return node


class _Builder:
    """Makes plain values of nodes."""

    def __init__(self, tree: Tree, loader: _Loader) -> None:
        self.tree = tree
        self.loader = loader
        self.open: set[int] = set()

    def value(self, node: Node, path: str, depth: int) -> Any:
        self.tree.enter(depth, self.span(node))
        if node.tag not in _KNOWN:
            tag = node.tag.replace(_TAG, "!!")
            message = f"the tag `{tag}`{' would run code and' if 'python' in tag else ''} is refused"
            raise self.tree.refused("E0012", message, "remove the tag", self.span(node))
        if isinstance(node, ScalarNode):
            if node.start_mark.index != node.end_mark.index:
                self.tree.spans[path] = self.span(node)
            return self.scalar(node, path)
        if id(node) in self.open:
            message = "an alias stands within what it stands for, which has no end"
            raise self.tree.refused("E1109", message, "write the value out", self.span(node))
        self.open.add(id(node))
        if node.flow_style or "[" in path[-6:]:
            self.tree.spans[path] = self.span(node)
        made = (
            self.items(node, path, depth) if isinstance(node, SequenceNode) else self.keys(node, path, depth)
        )
        self.open.discard(id(node))
        return made

    def items(self, node: SequenceNode, path: str, depth: int) -> list[Any]:
        return [self.value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]

    def keys(self, node: MappingNode, path: str, depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        merged = [
            pair for key, value in node.value if key.tag == _MERGE for pair in self.merged(value, depth)
        ]
        own = [pair for pair in node.value if pair[0].tag != _MERGE]
        given: set[str] = set()
        for number, (key, value) in enumerate([*merged, *own]):
            span = self.span(key)
            if not isinstance(key, ScalarNode):
                raise self.no_key(key, span)
            name = conceal(key.value) or '""'
            below = join(path, name)
            if name in given:
                self.tree.repeated(name, below, span)
            if number >= len(merged):
                given.add(name)
            if name in made:
                self.tree.forget(below)
            self.tree.keys[below] = span
            made[name] = self.value(value, below, depth + 1)
        return made

    def merged(self, node: Node, depth: int) -> list[tuple[Node, Node]]:
        """The pairs that `<<` takes over; of several mappings the first one's hold."""
        self.tree.enter(depth, self.span(node))
        if isinstance(node, SequenceNode):
            return [pair for part in reversed(node.value) for pair in self.merged(part, depth + 1)]
        if not isinstance(node, MappingNode):
            message = "`<<` takes over a mapping, and this is none"
            raise self.tree.refused("E0006", f"not valid YAML: {message}", "<<: *anchor", self.span(node))
        self.tree.count += len(node.value)
        further = [
            pair for key, value in node.value if key.tag == _MERGE for pair in self.merged(value, depth + 1)
        ]
        return [*further, *(pair for pair in node.value if pair[0].tag != _MERGE)]

    def scalar(self, node: ScalarNode, path: str) -> Any:
        """The value of a scalar, by YAML 1.1's rules."""
        plain = node.style is None
        if node.tag == f"{_TAG}str" and plain and _NUMBER.fullmatch(node.value):
            return float(node.value)
        if node.tag in (f"{_TAG}timestamp", f"{_TAG}value"):
            return node.value
        try:
            made = self.loader.construct_object(node)
        except (ValueError, KeyError) as error:
            message = f"not valid YAML: `{node.value[:40]}` cannot be read as {node.tag.removeprefix(_TAG)}"
            raise self.tree.refused("E0006", message, "put quotes around it", self.span(node)) from error
        if isinstance(made, str):
            return self.tree.value(made, path)
        return self.tree.whole(made, node.value) if isinstance(made, int) else made

    def no_key(self, key: Node, span: Span) -> Refused:
        """A mapping or list for a key: what `{{ name }}` without quotes is to YAML."""
        if _JINJA.search(span.text):
            return _jinja(self.tree, span.line - 1)
        message = "a list or a mapping cannot be a key: keys are names"
        return self.tree.refused("E0014", message, "put quotes around it", span)

    def span(self, node: Node) -> Span:
        """The node's part of its first line; of a block, its first word."""
        start, end = node.start_mark, node.end_mark
        if isinstance(node, MappingNode) and not node.flow_style and node.value:
            end = node.value[0][0].end_mark
        line = self.tree.lines[start.line] if start.line < len(self.tree.lines) else ""
        stop = end.column if end.line == start.line else len(line.rstrip())
        return self.tree.span(start.line, start.column, max(1, stop - start.column))


def _syntax(tree: Tree, error: yaml.MarkedYAMLError) -> Refused:
    if error.context == "expected a single document in the stream":
        mark = error.problem_mark
        message = "a second YAML document starts here; the tools read one"
        return tree.refused("E0008", message, "make a file of each document", tree.span(mark.line, 0))
    jinja = next((number for number, line in enumerate(tree.lines) if _JINJA.search(line)), None)
    if jinja is not None:
        return _jinja(tree, jinja)
    found = explain(cast(Any, error), tree.lines)
    return tree.refused(found.code, found.message, found.help, tree.span(found.line, found.column))


def _jinja(tree: Tree, line: int) -> Refused:
    at = _JINJA.search(tree.lines[line])
    assert at is not None
    message = f"the file is a Jinja template: `{at[0]}` starts an expression, whose value stands elsewhere"
    return tree.refused("E1106", message, JINJA_HELP, tree.span(line, at.start(), 2))


def _bad_character(tree: Tree, position: int) -> Refused:
    before = tree.text[:position]
    column = len(before) - (before.rfind("\n") + 1)
    code_point = ord(tree.text[position : position + 1] or "\0")
    message = f"the character U+{code_point:04X} is not allowed in YAML"
    return tree.refused("E0016", message, "remove it", tree.span(before.count("\n"), column))
