"""Read a ported file, YAML 1.1 or JSON, into a tree in which every key and value has its place.

YAML is read as PyYAML's safe_load reads it, and JSON as Python's json module does. There are two intended
differences. A number such as 1e-4, which PyYAML reads as text, becomes a number, as every tool makes it one
later. A date stays text.
"""

from __future__ import annotations

import ast
import json
import re
from bisect import bisect_right
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any, cast

import yaml
from yaml.events import AliasEvent
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from recipec.port.source import Source, join
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.load import display, read_text
from recipec.spec.secrets import Concealer, kind
from recipec.spec.yaml_document import E0005, E0008, E0012, E0014, E0015, E0016, MAX_DEPTH, Refused
from recipec.spec.yaml_errors import E0006, explain

MAX_BYTES = 1 << 20
"""The largest file that is read, in bytes. Any config is much smaller, and reading it takes seconds."""


def read(path: Path) -> tuple[Source | None, list[Diagnostic]]:
    """Read a file as a tree with places. Return None if it cannot be read, and the findings."""
    strict = path.suffix.lower() == ".json"  # the tools read YAML with a byte order mark, but not JSON
    text, problem = read_text(path, "a config", MAX_BYTES, "a config's YAML or JSON file", marked=not strict)
    if problem is not None:
        return None, [problem]
    tree = Tree(text, display(path))
    parse = parse_json if strict else parse_yaml
    try:
        data = parse(tree)
    except Refused as refused:
        return None, [*tree.diagnostics, refused.diagnostic]
    return Source(Path(path), tree.file, data, tree.spans, tree.keys, tree.secrets), tree.diagnostics


MOST_VALUES = 50_000
"""The most values of a file. The values behind an alias count each time."""

LONGEST = 1023
"""The most bits of a number that is read as a whole number. A float cannot hold longer ones."""

conceal = Concealer(None)
"""Replaces values that look like tokens by stars, in a text for messages."""


E1109 = Code(
    "E1109",
    "endless aliases",
    cause="A YAML alias is inside the value that it refers to, or nested aliases expand to millions "
    "of values.",
    cure="Write the values out.",
)

W1115 = Code(
    "W1115",
    "key given twice in a config",
    cause="A section contains the same key twice. The tools use the last one, and so does the port.",
    cure="Remove one of the two.",
)


@dataclass
class Tree:
    """A text that is being read.

    Attributes:
        file: the name for messages.
        spans, keys: the places of values and of their keys, by path.
        diagnostics: warnings; an error is raised as Refused.
        secrets: by path, the kind of each value that looks like a token: "an API key".
        count: the number of values so far.
    """

    text: str
    file: str
    spans: dict[str, Span] = field(default_factory=dict)
    keys: dict[str, Span] = field(default_factory=dict)
    diagnostics: list[Diagnostic] = field(default_factory=list)
    secrets: dict[str, str] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.lines = re.split(r"\r\n|[\n\r\x85\u2028\u2029]", conceal(self.text))

    def span(self, line: int, column: int, length: int = 1) -> Span:
        """Return a place. Line and column are counted from 0."""
        text = self.lines[line] if line < len(self.lines) else ""
        return Span(self.file, line + 1, column + 1, text, length)

    def refused(self, code: Code, message: str, help: str | None, span: Span) -> Refused:
        """Return the error to raise if nothing after this can be read."""
        return Refused(Diagnostic(code, message, help=help, span=span))

    def enter(self, depth: int, span: Span) -> None:
        """Count a value.

        Raises:
            Refused: it is nested too deep, or there are too many values.
        """
        self.count += 1
        if depth > MAX_DEPTH:
            message = f"lists and mappings are nested more than {MAX_DEPTH} deep"
            raise self.refused(E0015, message, "is it a config?", span)
        if self.count > MOST_VALUES:
            message = f"the file has more than {MOST_VALUES:,} values, counting what aliases repeat"
            raise self.refused(E1109, message, "is it a config? write out the values of aliases", span)

    def value(self, text: str, path: str) -> str:
        """Return the text at a path, with stars in place of values that look like tokens."""
        if match := kind(text):
            self.secrets[path] = match
        return conceal(text)

    def whole(self, number: int, text: str) -> int | str:
        """Return a whole number, or its text if it is larger than any float."""
        return number if number.bit_length() <= LONGEST else text

    def repeated(self, key: str, path: str, span: Span) -> None:
        """Warn about a key that its section has twice."""
        first = self.keys[path].line
        message = f"`{key}` is given twice: line {first} already has it, and the last value counts"
        self.diagnostics.append(Diagnostic(W1115, message, path, "remove one of the two", span))

    def forget(self, path: str) -> None:
        """Remove the places below a path, whose value another one replaces."""
        for places in (self.spans, self.keys, self.secrets):
            for known in [
                name for name in places if name == path or name.startswith((f"{path}.", f"{path}["))
            ]:
                places.pop(known)


def unparsed(node: ast.AST) -> str:
    """Return a node's code. Python 3.11 cannot write some f-strings of Python 3.12; they become "..."."""
    try:
        return ast.unparse(node)
    except ValueError:
        return "..."


@dataclass
class ScriptText:
    """A script's text, with the place of each of its lines in the file."""

    tree: Tree
    lines: list[str] = field(default_factory=list)
    places: list[tuple[int, list[int]]] = field(default_factory=list)

    def add(self, text: str, line: int, columns: list[int]) -> None:
        """Add a line of code, with its line in the file and the column of each character, both from 0."""
        self.lines.append(text)
        self.places.append((line, columns))

    def at(self, line: int, column: int, length: int = 1) -> Span:
        """Return the place in the file of a line (from 1) and a column of the code."""
        number, columns = self.places[min(line, len(self.places)) - 1]
        last = columns[-1] + 1 if columns else 0
        first, end = ((columns[c] if c < len(columns) else last) for c in (column, column + length))
        return self.tree.span(number, first, max(1, end - first))

    def span(self, node: Any, length: int = 0) -> Span:
        """Return the place of an expression's first line, or of a keyword whose name has the given length."""
        if isinstance(place := getattr(node, "place", None), Span):
            return place  # a value of another file
        line = self.lines[node.lineno - 1].encode()
        column = len(line[: node.col_offset].decode(errors="ignore"))
        end = line[: node.end_col_offset] if node.end_lineno == node.lineno else line
        return self.at(node.lineno, column, length or max(1, len(end.decode(errors="ignore")) - column))

    def shown(self, node: ast.AST) -> str:
        """Return an expression as text for messages."""
        text = " ".join(conceal(unparsed(node)).split())
        return text if len(text) <= 40 else f"{text[:37]}..."


_TAG = "tag:yaml.org,2002:"
_KNOWN = {
    f"{_TAG}{name}" for name in ("null", "bool", "int", "float", "str", "timestamp", "value", "map", "seq")
}
_MERGE = f"{_TAG}merge"
_NUMBER = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+")
_JINJA = re.compile(r"\{\{|\{%")
JINJA_HELP = "render the template first, and port the result"


def parse_yaml(tree: Tree) -> Any:
    """Return the value of a YAML text. The places are stored in the tree.

    Raises:
        Refused: the text is not YAML, or contains something that is not read.
    """
    try:
        loader = _Loader(tree)
        root = loader.get_single_node()
    except yaml.reader.ReaderError as error:
        raise _bad_character(tree, error.position) from None
    except yaml.MarkedYAMLError as error:
        raise _syntax(tree, error) from None
    except RecursionError:
        message = f"lists and mappings are nested more than {MAX_DEPTH} deep"
        raise tree.refused(E0015, message, "is it a config?", tree.span(0, 0)) from None
    if root is None or (isinstance(root, ScalarNode) and root.tag == f"{_TAG}null"):
        raise tree.refused(E0005, "the file is empty", _START, tree.span(0, 0))
    return _Builder(tree, loader).value(root, "", 0)


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, except that an alias's value has the alias's place, and the depth is limited."""

    def __init__(self, tree: Tree) -> None:
        super().__init__(tree.text)
        self.tree = tree
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Node:
        event = self.peek_event()
        self.depth += 1
        if self.depth > MAX_DEPTH + 2:
            mark = event.start_mark
            message = f"lists and mappings are nested more than {MAX_DEPTH} deep"
            raise self.tree.refused(E0015, message, "is it a config?", self.tree.span(mark.line, mark.column))
        node = super().compose_node(parent, index)
        self.depth -= 1
        if isinstance(event, AliasEvent) and isinstance(node, ScalarNode):
            return ScalarNode(node.tag, node.value, event.start_mark, event.end_mark, style=node.style)
        return node


E1120 = Code(
    "E1120",
    "merge key with two values",
    cause="`<<` includes several mappings that give a key different values. PyYAML up to 6.0.3 uses "
    "the first value, as YAML specifies. PyYAML 6.0.4 uses the last.",
    cure="Remove the key from one of the mappings, or write the keys out instead of `<<`.",
)


class _Builder:
    def __init__(self, tree: Tree, loader: _Loader) -> None:
        self.tree = tree
        self.loader = loader
        self.open: set[int] = set()

    def value(self, node: Node, path: str, depth: int) -> Any:
        self.tree.enter(depth, self.span(node))
        if node.tag not in _KNOWN:
            tag = node.tag.replace(_TAG, "!!")
            message = f"the tag `{tag}`{' would run code and' if 'python' in tag else ''} is refused"
            raise self.tree.refused(E0012, message, "remove the tag", self.span(node))
        if isinstance(node, ScalarNode):
            if node.start_mark.index != node.end_mark.index:
                self.tree.spans[path] = self.span(node)
            return self.scalar(node, path)
        if id(node) in self.open:
            message = "an alias refers to a value that contains the alias"
            raise self.tree.refused(E1109, message, "write the value out", self.span(node))
        self.open.add(id(node))
        if node.flow_style or "[" in path[-6:]:
            self.tree.spans[path] = self.span(node)
        parsed = (
            self.items(node, path, depth) if isinstance(node, SequenceNode) else self.keys(node, path, depth)
        )
        self.open.discard(id(node))
        return parsed

    def items(self, node: SequenceNode, path: str, depth: int) -> list[Any]:
        return [self.value(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(node.value)]

    def keys(self, node: MappingNode, path: str, depth: int) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        merged = [
            pair for key, value in node.value if key.tag == _MERGE for pair in self.merged(value, depth)
        ]
        pairs = [pair for pair in node.value if pair[0].tag != _MERGE]
        seen: set[str] = set()
        for number, (key, value) in enumerate([*merged, *pairs]):
            span = self.span(key)
            if not isinstance(key, ScalarNode):
                raise self.no_key(key, span)
            name = conceal(key.value) or '""'
            below = join(path, name)
            if name in seen:
                self.tree.repeated(name, below, span)
            if number >= len(merged):
                seen.add(name)
            if name in mapping:
                self.tree.forget(below)
            self.tree.keys[below] = span
            mapping[name] = self.value(value, below, depth + 1)
        return mapping

    def merged(self, node: Node, depth: int) -> list[tuple[Node, Node]]:
        """Return the pairs that `<<` merges."""
        self.tree.enter(depth, self.span(node))
        if isinstance(node, SequenceNode):
            parts = [self.merged(part, depth + 1) for part in node.value]
            self.agree(parts)
            return [pair for part in parts for pair in part]
        if not isinstance(node, MappingNode):
            message = "`<<` needs a mapping, and this is not one"
            raise self.tree.refused(E0006, f"not valid YAML: {message}", "<<: *anchor", self.span(node))
        self.tree.count += len(node.value)
        further = [
            pair for key, value in node.value if key.tag == _MERGE for pair in self.merged(value, depth + 1)
        ]
        return [*further, *(pair for pair in node.value if pair[0].tag != _MERGE)]

    def agree(self, parts: list[list[tuple[Node, Node]]]) -> None:
        """Refuse `<<: [*a, *b]` that differ in a value: PyYAML 6.0.3 takes the first one, 6.0.4 the last."""
        known: dict[str, Node] = {}
        for part in parts:
            for key, value in {str(key.value): (key, value) for key, value in part}.values():
                other = known.setdefault(str(key.value), value)
                if (other.tag, other.value) != (value.tag, value.value):
                    message = (
                        f"`<<` gives two values of `{key.value}`, and which one applies depends on PyYAML"
                    )
                    help_ = "remove it from one of the mappings, or write their keys out instead of `<<`"
                    raise self.tree.refused(E1120, message, help_, self.span(key))

    def scalar(self, node: ScalarNode, path: str) -> Any:
        """Return a scalar's value by the rules of YAML 1.1."""
        plain = node.style is None
        if node.tag == f"{_TAG}str" and plain and _NUMBER.fullmatch(node.value):
            return float(node.value)
        if node.tag in (f"{_TAG}timestamp", f"{_TAG}value"):
            return node.value
        try:
            parsed = self.loader.construct_object(node)
        except (ValueError, KeyError) as error:
            message = f"not valid YAML: `{node.value[:40]}` cannot be read as {node.tag.removeprefix(_TAG)}"
            raise self.tree.refused(E0006, message, "put quotes around it", self.span(node)) from error
        if isinstance(parsed, str):
            return self.tree.value(parsed, path)
        return self.tree.whole(parsed, node.value) if isinstance(parsed, int) else parsed

    def no_key(self, key: Node, span: Span) -> Refused:
        """Return the error for a mapping or list as a key. `{{ name }}` without quotes is one in YAML."""
        if _JINJA.search(span.text):
            return _jinja(self.tree, span.line - 1)
        message = "a list or a mapping cannot be a key: keys are names"
        return self.tree.refused(E0014, message, "put quotes around it", span)

    def span(self, node: Node) -> Span:
        """Return the place of a node's first line; of a block, its first word."""
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
        return tree.refused(E0008, message, "make a file of each document", tree.span(mark.line, 0))
    jinja = next((number for number, line in enumerate(tree.lines) if _JINJA.search(line)), None)
    if jinja is not None:
        return _jinja(tree, jinja)
    problem = explain(cast(Any, error), tree.lines)
    return tree.refused(problem.code, problem.message, problem.help, tree.span(problem.line, problem.column))


E1106 = Code(
    "E1106",
    "Jinja in a config",
    cause="A value is a Jinja expression, or the file is a Jinja template. A launcher fills it in, "
    "which a port does not run.",
    cure="Render the template, and port the result.",
)


def _jinja(tree: Tree, line: int) -> Refused:
    at = _JINJA.search(tree.lines[line])
    assert at is not None
    message = f"the file is a Jinja template: `{at[0]}` starts an expression, whose value is elsewhere"
    return tree.refused(E1106, message, JINJA_HELP, tree.span(line, at.start(), 2))


def _bad_character(tree: Tree, position: int) -> Refused:
    before = tree.text[:position]
    column = len(before) - (before.rfind("\n") + 1)
    code_point = ord(tree.text[position : position + 1] or "\0")
    message = f"the character U+{code_point:04X} is not allowed in YAML"
    return tree.refused(E0016, message, "remove it", tree.span(before.count("\n"), column))


_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null|NaN|-?Infinity")
_START = "recipe port takes a config of the tool, such as its YAML file"


def parse_json(tree: Tree) -> Any:
    """Return the value of a JSON text. The places are stored in the tree.

    Raises:
        Refused: the text is not JSON, or is nested too deep or too large.
    """
    if not tree.text.strip():
        raise tree.refused(E0005, "the file is empty", _START, tree.span(0, 0))
    return _Reader(tree).whole()


E1105 = Code(
    "E1105",
    "not valid JSON",
    cause="The text breaks JSON's grammar at the place shown, so the tool cannot read it either.",
    cure="Correct it. JSON allows no comments, and no comma before a closing bracket.",
)


class _Reader:
    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.text = tree.text
        self.starts = [0]
        for line_end in re.finditer(r"\r\n|[\n\r\x85\u2028\u2029]", self.text):
            self.starts.append(line_end.end())

    def whole(self) -> Any:
        value, at = self.value(self.skip(0), "", 0)
        at = self.skip(at)
        if at < len(self.text):
            raise self.fault("more text follows after the end of the value", at)
        return value

    def value(self, at: int, path: str, depth: int) -> tuple[Any, int]:
        """Return the value that starts at a character, and the position after it."""
        self.tree.enter(depth, self.span(at))
        sign = self.text[at : at + 1]
        if sign == "{":
            return self.object(at, path, depth)
        if sign == "[":
            return self.array(at, path, depth)
        if sign == '"':
            value, end = self.string(at)
            value = self.tree.value(value, path)
        else:
            match = _PLAIN.match(self.text, at)
            if match is None:
                raise self.fault("a value is missing here", at)
            value, end = self.plain(match[0], at), match.end()
        self.tree.spans[path] = self.span(at, end - at)
        return value, end

    def plain(self, text: str, at: int) -> Any:
        try:
            parsed = json.loads(text)
        except ValueError:  # a whole number with thousands of digits
            raise self.fault("the number is too long", at) from None
        return self.tree.whole(parsed, text) if isinstance(parsed, int) else parsed

    def object(self, at: int, path: str, depth: int) -> tuple[dict[str, Any], int]:
        mapping: dict[str, Any] = {}
        at, start = self.skip(at + 1), at
        while self.text[at : at + 1] != "}":
            if mapping and self.text[at : at + 1] != ",":
                raise self.fault("a comma or the closing `}` is missing here", at, start)
            at = self.skip(at + 1) if mapping else at
            if self.text[at : at + 1] != '"':
                raise self.fault("a key in double quotes is missing here", at, start)
            key, end = self.string(at)
            name, span = conceal(key) or '""', self.span(at, end - at)
            below = join(path, name)
            if name in mapping:
                self.tree.repeated(name, below, span)
                self.tree.forget(below)
            at = self.skip(end)
            if self.text[at : at + 1] != ":":
                raise self.fault("a colon is missing after the key", at)
            self.tree.keys[below] = span
            mapping[name], at = self.value(self.skip(at + 1), below, depth + 1)
            at = self.skip(at)
        return mapping, at + 1

    def array(self, at: int, path: str, depth: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        at, start = self.skip(at + 1), at
        while self.text[at : at + 1] != "]":
            if items and self.text[at : at + 1] != ",":
                raise self.fault("a comma or the closing `]` is missing here", at, start)
            at = self.skip(at + 1) if items else at
            value, at = self.value(at, f"{path}[{len(items)}]", depth + 1)
            items.append(value)
            at = self.skip(at)
        self.tree.spans[path] = self.span(start, at + 1 - start)
        return items, at + 1

    def string(self, at: int) -> tuple[str, int]:
        try:
            text, end = scanstring(self.text, at + 1, True)
        except json.JSONDecodeError as error:
            what = error.msg[0].lower() + error.msg[1:]
            raise self.fault(f"the text cannot be read: {what.removesuffix(' at')}", error.pos) from None
        return text, end

    def skip(self, at: int) -> int:
        match = _SPACE.match(self.text, at)
        assert match is not None
        return match.end()

    def fault(self, what: str, at: int, start: int | None = None) -> Refused:
        """Return the error to raise. At the text's end, its place is the open bracket."""
        if at >= len(self.text) and start is not None:
            at, what = start, f"the `{self.text[start]}` that opens here is not closed"
        help = "json.load of Python refuses it too; the file may be truncated, or have comments"
        return self.tree.refused(E1105, f"not valid JSON: {what}", help, self.span(min(at, len(self.text))))

    def span(self, at: int, length: int = 1) -> Span:
        line = bisect_right(self.starts, at) - 1
        column = at - self.starts[line]
        return self.tree.span(line, column, min(length, max(1, len(self.tree.lines[line]) - column)))
