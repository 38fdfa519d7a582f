"""Edits of a YAML text that leave everything else in it as it stands: comments, order, quotes, line ends.

Each edit is tried, not known to be right: who asks for one reads the text again. Positions are in characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from spec.core_schema import flow
from spec.paths import Part

INDENT = 2
"""Columns that a new section's keys are moved in by."""


@dataclass(frozen=True)
class Taken:
    """A key and its value, taken out of a text.

    Attributes:
        body: what follows the key, from its colon to the value's end.
        column: of the key, 0-based, which the further lines of `body` are indented from.
        above: the lines of comment that belong to it, without their indentation.
        beside: the comment at its end with the blanks before it, or "".
    """

    body: str
    column: int = 0
    above: tuple[str, ...] = ()
    beside: str = ""


class Layout:
    """One text of one mapping, with the extent of every key and value.

    Raises:
        LookupError: by every edit whose path leads nowhere.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.root: Node = YAML(typ="safe", pure=True).compose(text)

    def renamed(self, path: Sequence[Part], key: str) -> str:
        """The text with another name for the last key of the path."""
        node, _ = self._entry(path)
        assert isinstance(node, ScalarNode)
        quote = node.style if node.style in ("'", '"') and key.isidentifier() else ""
        name = f"{quote}{key}{quote}" if quote else flow(key)
        return self._replaced(node.start_mark.index, node.end_mark.index, name)

    def changed(self, path: Sequence[Part], value: str) -> str:
        """The text with another value, given as YAML on one line."""
        if isinstance(path[-1], int):
            node = self._node(path)
            return self._replaced(node.start_mark.index, self._end(node), value)
        key, node = self._entry(path)
        colon = self._colon(key)
        inline = self._line_start(node.start_mark.index) <= key.start_mark.index and self._end(node) > colon
        if inline:
            return self._replaced(node.start_mark.index, self._end(node), value)
        sign = "" if self.text[colon - 1] == ":" else ":"
        return self._replaced(colon, self._entry_end(key, node), f"{sign} {value}")

    def without(self, path: Sequence[Part]) -> tuple[str, Taken]:
        """The text without the last key of the path, and what was taken out; its section may stay as `{}`."""
        parent = self._mapping(path[:-1])
        index = next(i for i, (key, _) in enumerate(parent.value) if key.value == path[-1])
        return (
            self._out_of_flow(parent, index) if parent.flow_style else self._out_of_block(path, parent, index)
        )

    def with_entry(self, path: Sequence[Part], taken: Taken) -> str:
        """The text with a key at the end of its section; sections on the way that are missing are made."""
        depth = len(path) - 1
        while not self._has(path[:depth]):
            depth -= 1
        parent, *sections, key = self._mapping(path[:depth]), *path[depth:]
        if parent.flow_style:
            return self._into_flow(parent, [str(name) for name in sections], str(key), taken)
        return self._into_block(parent, [str(name) for name in sections], str(key), taken)

    def with_first(self, key: str, value: str) -> str:
        """The text with a key before all others."""
        parent = self._mapping(())
        entry = f"{flow(key)}: {value}"
        if parent.flow_style:
            return self._into(parent.start_mark.index + 1, entry + ", " * bool(parent.value))
        start = parent.value[0][0].start_mark.index
        return self._into(start, entry + self.newline + " " * (start - self._line_start(start)))

    @cached_property
    def comments(self) -> list[str]:
        """Every comment, in order of the text."""
        within = sorted((node.start_mark.index, self._end(node)) for node in self._scalars(self.root))
        found, at = [], 0
        for match in re.finditer(r"(?:(?<=\s)|^)#[^\n\r]*", self.text):
            while at < len(within) and within[at][1] <= match.start():
                at += 1
            if at == len(within) or match.start() < within[at][0]:
                found.append(match[0].rstrip())
        return found

    def _out_of_flow(self, parent: MappingNode, index: int) -> tuple[str, Taken]:
        key, value = parent.value[index]
        start, end = key.start_mark.index, self._entry_end(key, value)
        taken = Taken(self.text[key.end_mark.index : end] or ":")
        if index + 1 < len(parent.value):
            end = parent.value[index + 1][0].start_mark.index
        elif index:
            start = self._entry_end(*parent.value[index - 1])
        else:
            end = parent.end_mark.index - 1
        return self._replaced(start, end, ""), taken

    def _out_of_block(self, path: Sequence[Part], parent: MappingNode, index: int) -> tuple[str, Taken]:
        key, value = parent.value[index]
        start, end = key.start_mark.index, self._entry_end(key, value)
        line, stop = self._line_start(start), self._line_end(end)
        body = self.text[key.end_mark.index : end]
        beside = self.text[end:stop].rstrip()
        own_line = not self.text[line:start].strip()
        headed = own_line and (
            index or parent is not self.root
        )  # comments above the first key are the file's
        top = self._comment_start(line, start - line) if headed else line
        above = tuple(text.strip() for text in self.text[top:line].splitlines())
        taken = Taken(body, start - line, above, beside)
        if len(parent.value) == 1 and path[:-1]:
            if not own_line:  # the only key of a list's item
                return self._replaced(start, stop, "{}"), taken
            owner = self._colon(self._entry(path[:-1])[0]) if isinstance(path[-2], str) else None
            if owner is not None:
                rest = self._replaced(top, self._next_line(stop), "")
                return rest[:owner] + " {}" + rest[owner:], taken
        if not own_line:
            return self._replaced(start, parent.value[index + 1][0].start_mark.index, ""), taken
        return self._replaced(*self._with_blank(top, self._next_line(stop)), ""), taken

    def _into_flow(self, parent: MappingNode, sections: list[str], key: str, taken: Taken) -> str:
        """In braces; comments go above the line that these start on."""
        opened = "".join(f"{flow(name)}: {{" for name in sections)
        entry = f"{opened}{flow(key)}{taken.body}{'}' * len(sections)}"
        at = self._entry_end(*parent.value[-1]) if parent.value else parent.start_mark.index + 1
        text = self._into(at, f", {entry}" if parent.value else entry)
        line = self._line_start(parent.start_mark.index)
        indent = " " * self._indent(line)
        comments = [*taken.above, *([taken.beside.strip()] if taken.beside.strip() else [])]
        return text[:line] + "".join(f"{indent}{c}{self.newline}" for c in comments) + text[line:]

    def _into_block(self, parent: MappingNode, sections: list[str], key: str, taken: Taken) -> str:
        first, last = parent.value[0][0], parent.value[-1]
        column = first.start_mark.index - self._line_start(first.start_mark.index)
        lines = [" " * (column + INDENT * depth) + f"{flow(name)}:" for depth, name in enumerate(sections)]
        column += INDENT * len(sections)
        lines += [f"{' ' * column}{comment}" for comment in taken.above]
        shifted = self._shifted(taken.body, column - taken.column)
        lines.append(f"{' ' * column}{flow(key)}{shifted}{taken.beside}")
        stop = self._line_end(self._entry_end(*last))
        apart = parent is self.root and sections and self._stands_apart(last[0].start_mark.index)
        block = self.newline * bool(apart) + self.newline.join(lines)
        at = self._next_line(stop)
        return self._into(at, block + self.newline) if at > stop else self._into(at, self.newline + block)

    def _shifted(self, body: str, by: int) -> str:
        first, *rest = body.split("\n")
        moved = [
            " " * by + line if by > 0 and line.strip() else line[min(max(-by, 0), _blanks(line)) :]
            for line in rest
        ]
        return "\n".join([first, *moved])

    def _has(self, path: Sequence[Part]) -> bool:
        try:
            self._mapping(path)
        except LookupError:
            return False
        return True

    def _node(self, path: Sequence[Part]) -> Node:
        node = self.root
        for part in path:
            if isinstance(part, int) and isinstance(node, SequenceNode):
                node = node.value[part]
            elif isinstance(node, MappingNode) and part in {key.value for key, _ in node.value}:
                node = next(value for key, value in node.value if key.value == part)
            else:
                raise LookupError(path)
        return node

    def _mapping(self, path: Sequence[Part]) -> MappingNode:
        node = self._node(path)
        if not isinstance(node, MappingNode):
            raise LookupError(path)
        return node

    def _entry(self, path: Sequence[Part]) -> tuple[Node, Node]:
        for key, value in self._mapping(path[:-1]).value:
            if key.value == path[-1]:
                return key, value
        raise LookupError(path)

    def _scalars(self, node: Node) -> Iterator[ScalarNode]:
        if isinstance(node, ScalarNode):
            yield node
        for below in node.value if not isinstance(node, ScalarNode) else ():
            for part in below if isinstance(below, tuple) else (below,):
                yield from self._scalars(part)

    def _end(self, node: Node) -> int:
        """Where a value's text ends; what follows a block of lines is none of it."""
        if isinstance(node, ScalarNode):
            start, end = node.start_mark.index, node.end_mark.index
            return start + len(self.text[start:end].rstrip()) if node.style in ("|", ">") else end
        assert isinstance(node, MappingNode | SequenceNode)
        if node.flow_style:
            return int(node.end_mark.index)
        last = node.value[-1]
        return self._entry_end(*last) if isinstance(last, tuple) else self._end(last)

    def _entry_end(self, key: Node, value: Node) -> int:
        end = self._end(value)
        empty = isinstance(value, ScalarNode) and value.start_mark.index == end
        return self._colon(key) if empty else end

    def _colon(self, key: Node) -> int:
        """Where the colon after a key ends; where the key ends, if it has none."""
        end = int(key.end_mark.index)
        match = re.compile(r"\s*:").match(self.text, end)
        return match.end() if match else end

    def _comment_start(self, line: int, indent: int) -> int:
        """Where the lines of comment begin that stand right above a line, as far in as it."""
        while line:
            before = self._line_start(line - 1)
            text = self.text[before:line]
            if not text.lstrip().startswith("#") or _blanks(text) != indent:
                break
            line = before
        return line

    def _with_blank(self, start: int, end: int) -> tuple[int, int]:
        """A range of lines, with an empty one beside it where two would meet, or one would begin the text."""
        stop = self._line_end(end)
        follows = end < len(self.text) and not self.text[end:stop].strip()
        before = self._line_start(start - 1) if start else 0
        if start and not self.text[before:start].strip() and (follows or end == len(self.text)):
            return before, end
        return (start, self._next_line(stop)) if not start and follows else (start, end)

    def _stands_apart(self, at: int) -> bool:
        """Whether an empty line stands before the line of a key and the comments above it."""
        line = self._line_start(at)
        top = self._comment_start(line, at - line)
        return top > 0 and not self.text[self._line_start(top - 1) : top].strip()

    def _line_start(self, at: int) -> int:
        return self.text.rfind("\n", 0, at) + 1

    def _line_end(self, at: int) -> int:
        """Where the line's text ends, before what ends the line."""
        end = self.text.find("\n", at)
        end = len(self.text) if end < 0 else end
        return end - 1 if end > at and self.text[end - 1] == "\r" else end

    def _next_line(self, stop: int) -> int:
        """Where the next line begins, from the end of a line's text."""
        return stop + (
            2 if self.text[stop : stop + 2] == "\r\n" else 1 if self.text[stop : stop + 1] == "\n" else 0
        )

    def _indent(self, line: int) -> int:
        return _blanks(self.text[line : self._line_end(line)])

    def _replaced(self, start: int, end: int, by: str) -> str:
        return self.text[:start] + by + self.text[end:]

    def _into(self, at: int, text: str) -> str:
        return self._replaced(at, at, text)


def _blanks(line: str) -> int:
    return len(line) - len(line.lstrip(" "))
