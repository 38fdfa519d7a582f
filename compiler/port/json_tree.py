"""JSON as Python's json module reads it, with the place of every key and value."""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from compiler.port.source import join
from compiler.port.tree import Tree, conceal
from spec.diagnostics import Span
from spec.document import Refused

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?|true|false|null|NaN|-?Infinity")
_START = "recipe port takes a config of the tool, such as its YAML file"


def parse(tree: Tree) -> Any:
    """The value of a JSON text; its places are left in the tree.

    Raises:
        Refused: it is no JSON, or too deep or large.
    """
    if not tree.text.strip():
        raise tree.refused("E0005", "the file is empty", _START, tree.span(0, 0))
    return _Reader(tree).whole()


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
            raise self.fault("more follows after the end of the value", at)
        return value

    def value(self, at: int, path: str, depth: int) -> tuple[Any, int]:
        """The value that starts at a character, and where it ends."""
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
            made = json.loads(text)
        except ValueError:  # a whole number of thousands of digits
            raise self.fault("the number is too long", at) from None
        return self.tree.whole(made, text) if isinstance(made, int) else made

    def object(self, at: int, path: str, depth: int) -> tuple[dict[str, Any], int]:
        made: dict[str, Any] = {}
        at, start = self.skip(at + 1), at
        while self.text[at : at + 1] != "}":
            if made and self.text[at : at + 1] != ",":
                raise self.fault("a comma or the closing `}` is missing here", at, start)
            at = self.skip(at + 1) if made else at
            if self.text[at : at + 1] != '"':
                raise self.fault("a key in double quotes is missing here", at, start)
            key, end = self.string(at)
            name, span = conceal(key) or '""', self.span(at, end - at)
            below = join(path, name)
            if name in made:
                self.tree.repeated(name, below, span)
                self.tree.forget(below)
            at = self.skip(end)
            if self.text[at : at + 1] != ":":
                raise self.fault("a colon is missing after the key", at)
            self.tree.keys[below] = span
            made[name], at = self.value(self.skip(at + 1), below, depth + 1)
            at = self.skip(at)
        return made, at + 1

    def array(self, at: int, path: str, depth: int) -> tuple[list[Any], int]:
        made: list[Any] = []
        at, start = self.skip(at + 1), at
        while self.text[at : at + 1] != "]":
            if made and self.text[at : at + 1] != ",":
                raise self.fault("a comma or the closing `]` is missing here", at, start)
            at = self.skip(at + 1) if made else at
            value, at = self.value(at, f"{path}[{len(made)}]", depth + 1)
            made.append(value)
            at = self.skip(at)
        self.tree.spans[path] = self.span(start, at + 1 - start)
        return made, at + 1

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
        """What to raise; at the text's end, the place is where the open bracket stands."""
        if at >= len(self.text) and start is not None:
            at, what = start, f"the `{self.text[start]}` that opens here is not closed"
        help = "json.load of Python refuses it too; the file may have been cut off, or hold comments"
        return self.tree.refused("E1105", f"not valid JSON: {what}", help, self.span(min(at, len(self.text))))

    def span(self, at: int, length: int = 1) -> Span:
        from bisect import bisect_right

        line = bisect_right(self.starts, at) - 1
        column = at - self.starts[line]
        return self.tree.span(line, column, min(length, max(1, len(self.tree.lines[line]) - column)))
