"""Read YAML text into a tree with positions.

ruamel.yaml parses the text into events, from which this module builds the tree. It reads values by YAML 1.2's
core schema. It refuses features that can give a file an unexpected meaning: anchors, merge keys, tags and
duplicate keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
)
from ruamel.yaml.reader import ReaderError

from recipec.spec.codes import Code
from recipec.spec.core_schema import scalar
from recipec.spec.diagnostics import Diagnostic, Span
from recipec.spec.tree import Entry, Items, Mapping, Node, Provenance, Scalar
from recipec.spec.yaml_errors import E0006, UNCLEAR, explain

MAX_DEPTH = 32

MOST_FAULTS = 100
"""Most problems of one file that are reported; each keeps its line, which may be the whole file."""

LINE_BREAK = re.compile(r"\r\n|[\n\r]")
"""Line breaks of YAML 1.2, which treats Unicode's other line breaks as ordinary characters."""

DOCUMENT_END = re.compile(r"\.\.\.(\s|$)")
IGNORED_LINE = re.compile(r"\s*(#|$)")

START = "start from `recipe new NAME --model ID --accelerator A`"
"""The help for a file that does not hold a recipe."""

_PLAIN_KEY = "write `key: value`, and put quotes around text in brackets or braces"


class Refused(Exception):
    """Reading stops at this diagnostic."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic.message)
        self.diagnostic = diagnostic


@dataclass
class Document:
    """The result of reading a text: a tree, or None, and diagnostics."""

    root: Node | None
    diagnostics: list[Diagnostic] = field(default_factory=list)


def read(text: str, file: str, kind: str = "file", first_line: int = 1, shown: str | None = None) -> Document:
    """Read one YAML document.

    Args:
        text: the whole text.
        file: the name to show in diagnostics.
        kind: the `kind` of the nodes' Provenance.
        first_line: the number of the text's first line.
        shown: the source line to show, if the text is one line with a part blanked out.
    """
    lines = [shown] if shown is not None else LINE_BREAK.split(text)
    reader = _Reader(text, lines, file, kind, first_line)
    try:
        return Document(reader.document(), reader.diagnostics)
    except Refused as refused:
        return Document(None, [*reader.diagnostics, refused.diagnostic])


def place(before: str) -> tuple[int, int]:
    """Return the line and column, both 0-based, of what follows this text."""
    lines = LINE_BREAK.split(before)
    return len(lines) - 1, len(lines[-1])


E0005 = Code(
    "E0005",
    "file is empty",
    cause="The file contains only white space and comments.",
    cure="Start from `recipe new`, or from one of the files in recipes/.",
)

E0008 = Code(
    "E0008",
    "several documents in one file",
    cause="A line `---` starts a second YAML document. A recipe is one document.",
    cure="Write each into a file of its own. A recipe can build on another with `extends`.",
)

E0009 = Code(
    "E0009",
    "key given twice",
    cause="A section contains the same key twice. Other tools silently use the last one.",
    cure="Remove one of the two.",
)

E0010 = Code(
    "E0010",
    "YAML anchor or alias",
    cause="Anchors (`&x`) and aliases (`*x`) are not allowed. Each value must be written where it is used.",
    cure="Write the value out, or share it between recipes with `extends`.",
)

E0011 = Code(
    "E0011",
    "YAML merge key",
    cause="The merge key `<<` is not allowed. It is not part of YAML 1.2.",
    cure="Write the keys out, or put them into a base recipe and name it with `extends`.",
)

E0012 = Code(
    "E0012",
    "YAML tag",
    cause="Tags (`!x`, `!!python/...`) are not allowed. Some would run code, and a recipe needs none.",
    cure="Remove the tag. Quote the value if it is text.",
)

E0014 = Code(
    "E0014",
    "key is not text",
    cause="A key is a list, a mapping, a number, true, false or null.",
    cure="Write a plain name. Put quotes around it if it looks like a number.",
)

E0015 = Code(
    "E0015",
    "nested too deeply",
    cause="Lists and mappings are nested more than 32 levels deep.",
    cure="Close the brackets. No recipe needs such depth.",
)

E0016 = Code(
    "E0016",
    "character that YAML does not allow",
    cause="The file contains a control character.",
    cure="Remove it, or write it as an escape within double quotes.",
)

E0017 = Code(
    "E0017",
    "YAML directive",
    cause="A line that starts with `%` is a directive to the YAML reader. Recipes are YAML 1.2 and "
    "allow none.",
    cure="Remove the line.",
)


class _Reader:
    """One pass over the parser's events."""

    def __init__(self, text: str, lines: list[str], file: str, kind: str, first_line: int) -> None:
        self.text = text
        self.lines = lines
        self.file = file
        self.kind = kind
        self.first_line = first_line
        self.diagnostics: list[Diagnostic] = []
        self.events: Iterator[Any] = iter(())

    def document(self) -> Node:
        """Return the document's root node.

        Raises:
            Refused: when there is none, or the document cannot be read to its end.
        """
        root: Node | None = None
        self.refuse_directives()
        try:
            self.events = YAML(typ="safe", pure=True).parse(self.text)
            for event in self.events:
                if isinstance(event, DocumentStartEvent):
                    if root is not None:
                        message = "a second YAML document starts here; a recipe is one document"
                        raise self.refused(
                            E0008, message, "write each document into its own file", self.span_of(event)
                        )
                elif isinstance(event, ScalarEvent | MappingStartEvent | SequenceStartEvent | AliasEvent):
                    root = self.node(event, 0)
        except ReaderError as error:
            raise self.bad_character(error) from None
        except MarkedYAMLError as error:
            raise self.syntax(error) from None
        except (YAMLError, ValueError) as error:
            raise self.refused(E0006, f"not valid YAML: {error}", UNCLEAR, self.span(0, 0)) from None
        if root is None or (isinstance(root, Scalar) and root.value is None and root.plain):
            raise self.refused(E0005, "the file is empty", START, self.span(0, 0))
        return root

    def node(self, event: Any, depth: int) -> Node:
        """Return the node that starts with this event, and consume its events."""
        span = self.span_of(event)
        place = Provenance(self.kind, span)
        if depth > MAX_DEPTH:
            message = f"lists and mappings are nested more than {MAX_DEPTH} levels deep"
            raise self.refused(E0015, message, "close the brackets before", span)
        if isinstance(event, AliasEvent):
            message = f"the alias `*{event.anchor}` is not allowed"
            self.report(E0010, message, "write the value out, or share it with `extends`", span)
            return Scalar(None, place, unread=True)
        if event.anchor is not None:
            message = f"the anchor `&{event.anchor}` is not allowed"
            help = "remove it; to share values between recipes, use `extends`"
            self.report(E0010, message, help, self.span_of_mark(span, "&"))
        if event.tag is not None:
            self.refuse_tag(str(event.tag), span)
        if isinstance(event, ScalarEvent):
            plain = not event.style
            value = scalar(event.value) if plain else event.value
            node: Node = Scalar(value, place, plain)
        elif isinstance(event, SequenceStartEvent):
            node = self.items(event, place, depth)
        else:
            node = self.mapping(event, place, depth)
        return node if event.tag is None else Scalar(None, node.place, unread=True)

    def items(self, start: Any, place: Provenance, depth: int) -> Items:
        items = []
        while not isinstance(event := next(self.events), SequenceEndEvent):
            items.append(self.node(event, depth + 1))
        return Items(items, self.up_to(place, start, event))

    def mapping(self, start: Any, place: Provenance, depth: int) -> Mapping:
        entries: dict[str, Entry] = {}
        while not isinstance(event := next(self.events), MappingEndEvent):
            key = self.node(event, depth + 1)
            value = self.node(next(self.events), depth + 1)
            if isinstance(value, Scalar) and value.plain and value.place.span.length == 0:
                value = Scalar(value.value, key.place)
            self.add(entries, key, value)
        return Mapping(entries, self.up_to(place, start, event))

    def add(self, entries: dict[str, Entry], key: Node, value: Node) -> None:
        """Add a key and its value, unless the key is invalid."""
        span = key.place.span
        if not isinstance(key, Scalar):
            self.report(E0014, "a list or a mapping cannot be a key: keys are names", _PLAIN_KEY, span)
        elif key.plain and key.value == "<<":
            help = "write the keys out, or share them with `extends`"
            self.report(E0011, "merge keys are not allowed", help, span)
        elif not isinstance(key.value, str):
            source = span.text[span.column - 1 : span.column - 1 + span.length]
            self.report(E0014, f"`{source}` cannot be a key: keys are names", "put quotes around it", span)
        elif key.value in entries:
            first = entries[key.value].key.span.line
            where = "in this line" if first == span.line else f"on line {first}"
            message = f"`{key.value}` is given twice: it is already {where}"
            self.report(E0009, message, "remove one of the two", span)
        else:
            entries[key.value] = Entry(key.place, value)

    def span(self, line: int, column: int, length: int = 1) -> Span:
        """Return a span for a line and column, both 0-based."""
        text = self.lines[line] if line < len(self.lines) else ""
        return Span(self.file, line + self.first_line, column + 1, text, length)

    def span_of(self, event: Any) -> Span:
        """Return the event's part of its first line."""
        start, end = event.start_mark, event.end_mark
        span = self.span(start.line, start.column)
        stop = end.column if end.line == start.line else len(span.text.rstrip())
        return self.span(start.line, start.column, stop - start.column)

    def up_to(self, place: Provenance, start: Any, end: Any) -> Provenance:
        """Return the position of a bracketed list or mapping, up to its closing bracket or the line's end."""
        if not start.flow_style:
            return place
        span, first, last = place.span, start.start_mark, end.end_mark
        stop = last.column if last.line == first.line else len(span.text.rstrip())
        return Provenance(place.kind, self.span(first.line, first.column, stop - first.column))

    def span_of_mark(self, span: Span, sign: str) -> Span:
        """Return the position of the anchor or tag that starts with `sign`, at or just before a value."""
        start = span.column - 1
        ahead = span.text[start : start + 1] in ("&", "!")
        at = span.text.find(sign, start) if ahead else span.text.rfind(sign, 0, start)
        if at < 0:
            return span
        if sign == "!" and span.text[at - 1 : at] == "!":
            at -= 1
        match = re.compile(r"[^ \t,\[\]{}]+").match(span.text, at)
        return Span(span.file, span.line, at + 1, span.text, len(match[0]) if match else 1)

    def refuse_tag(self, tag: str, span: Span) -> None:
        shown = tag.replace("tag:yaml.org,2002:", "!!")
        message = f"the tag `{shown}`{' would run code and' if 'python' in tag else ''} is not allowed"
        self.report(E0012, message, "remove the tag", self.span_of_mark(span, "!"))

    def refuse_directives(self) -> None:
        """Refuse a directive of any name. ruamel reports %YAML and %TAG only, and other libraries refuse the
        rest.

        Raises:
            Refused: a line starts with `%` before the document, or after its end.
        """
        outside = True
        for number, text in enumerate(LINE_BREAK.split(self.text)):
            if outside and text.startswith("%"):
                message = "directives to the YAML reader are not allowed"
                span = self.span(number, 0, len(text))
                raise self.refused(E0017, message, "remove this line", span)
            outside = DOCUMENT_END.match(text) is not None or (
                outside and IGNORED_LINE.match(text) is not None
            )

    def bad_character(self, error: Any) -> Refused:
        line, column = place(self.text[: error.position])
        code_point = ord(self.text[error.position : error.position + 1] or "\0")
        message = f"the character U+{code_point:04X} is not allowed in YAML"
        return self.refused(E0016, message, "remove it", self.span(line, column))

    def syntax(self, error: MarkedYAMLError) -> Refused:
        explanation = explain(error, self.lines)
        return self.refused(
            explanation.code,
            explanation.message,
            explanation.help,
            self.span(explanation.line, explanation.column),
        )

    def report(self, code: Code, message: str, help: str | None, span: Span) -> None:
        if len(self.diagnostics) >= MOST_FAULTS:
            raise self.refused(code, message, help, span)
        self.diagnostics.append(Diagnostic(code, message, help=help, span=span))

    def refused(self, code: Code, message: str, help: str | None, span: Span) -> Refused:
        return Refused(Diagnostic(code, message, help=help, span=span))
