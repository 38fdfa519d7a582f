"""A recipe's outline, read by indentation and brackets: it never fails, whatever is half typed.

What a text means is for `spec.document`; this tells where keys and values stand in a text that YAML's grammar
may not accept yet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from compiler.lsp.outline import Entry, Outline, Path, Word, value_of
from spec.paths import Part

MOST_DEEP = 32

_BREAK = re.compile(r"\r\n|[\n\r]")
_PLAIN_KEY = r"(?![\[\]{}\"'#,|>&*!%@`])(?:(?!\s\#)[^\n\r])+?"
_QUOTED = r"\"(?:[^\"\\\n\r]|\\.)*\"|'(?:[^'\n\r]|'')*'"
_KEY = re.compile(rf"({_QUOTED}|{_PLAIN_KEY})[ \t]*:(?=[ \t\n\r]|$)")
_COMMENT = re.compile(r"[ \t]#")
_CLOSED = re.compile(_QUOTED)
_FLOW_PLAIN = re.compile(r"(?:(?![ \t]\#|:(?:[ \t,\[\]{}\n\r]|$))[^,\[\]{}\n\r])*")


@dataclass
class _Frame:
    """A section or list in lines, of which more may follow."""

    indent: int
    is_list: bool
    path: Path
    last: Part | None = None

    @property
    def child(self) -> Path:
        return self.path if self.last is None else (*self.path, self.last)


def scan(source: str) -> Outline:
    """The outline of a text."""
    scanner = _Scanner(source)
    scanner.run()
    return scanner.out


class _Scanner:
    def __init__(self, source: str) -> None:
        self.source = source
        self.out = Outline(source)
        starts = [0, *(match.end() for match in _BREAK.finditer(source))]
        ends = [*(match.start() for match in _BREAK.finditer(source)), len(source)]
        self.lines = list(zip(starts, ends, strict=True))
        self.stack = [_Frame(-1, False, ())]
        self.sections: list[tuple[int, Entry]] = []
        """Sections in lines that may go on, with their keys' indents."""

    def run(self) -> None:
        number = 0
        while number < len(self.lines):
            number = max(number + 1, self._line(number))

    def _line(self, number: int) -> int:
        """Reads a line with what belongs to it; returns the number of the next."""
        start, end = self.lines[number]
        at = self._skip_blanks(start, end)
        if at == end or self.source[at] == "#" or self.source.startswith(("---", "...", "%"), start):
            return number + 1
        column = at - start
        if self._is_too_deep(column):
            return number + 1
        while self.source[at] == "-" and (at + 1 == end or self.source[at + 1] in " \t"):
            path = self._item(column)
            following = self._skip_blanks(at + 1, end)
            entry = Entry(path, None, (following, following))
            self._add(entry, column)
            column, at = column + following - at, following
            if at == end or self.source[at] == "#" or self._is_too_deep(column):
                return number + 1
            if not _KEY.match(self.source, at, end) and not self._is_item(at, end):
                return self._value(entry, number, column - 1)
        key = _KEY.match(self.source, at, end)
        if key is None:
            return self._bare(number, at, column)
        frame = self._section(column)
        frame.last = _name(key[1])
        value = self._skip_blanks(key.end(), end)
        entry = Entry(frame.child, key.span(1), (value, value))
        self._add(entry, column)
        return self._value(entry, number, column)

    def _is_too_deep(self, column: int) -> bool:
        """Whether what stands at a column lies deeper than anything that the language has."""
        return len(self.stack) > MOST_DEEP and column > self.stack[-1].indent

    def _is_item(self, at: int, end: int) -> bool:
        return self.source[at] == "-" and (at + 1 == end or self.source[at + 1] in " \t")

    def _skip_blanks(self, at: int, end: int) -> int:
        while at < end and self.source[at] in " \t":
            at += 1
        return at

    def _add(self, entry: Entry, column: int) -> None:
        """Notes an entry, and that the sections it lies in go on to here."""
        while self.sections and not (
            self.sections[-1][0] <= column and _is_within(entry.path, self.sections[-1][1])
        ):
            self.sections.pop()
        self.sections.append((column, entry))
        self.out.entries.append(entry)
        self._extend(entry.value[1])

    def _extend(self, end: int) -> None:
        for _, above in self.sections[:-1]:
            above.open, above.value = True, (above.value[0], max(above.value[1], end))

    def _item(self, column: int) -> Path:
        while self.stack[-1].indent > column:
            self.stack.pop()
        top = self.stack[-1]
        if not (top.is_list and top.indent == column):
            top = _Frame(column, True, top.child, -1)
            self.stack.append(top)
        assert isinstance(top.last, int)
        top.last += 1
        return top.child

    def _section(self, column: int) -> _Frame:
        """The section whose keys stand at a column."""
        while self.stack[-1].indent > column or (self.stack[-1].indent == column and self.stack[-1].is_list):
            self.stack.pop()
        if self.stack[-1].indent < column:
            self.stack.append(_Frame(column, False, self.stack[-1].child))
        return self.stack[-1]

    def _bare(self, number: int, at: int, column: int) -> int:
        """A line without a key: half a key, a list or mapping in brackets, or the rest of a value above."""
        end = self.lines[number][1]
        while self.stack[-1].indent > column or (self.stack[-1].indent == column and self.stack[-1].is_list):
            self.stack.pop()
        top = self.stack[-1]
        path = top.path if top.indent == column else top.child
        if self.source[at] in "[{":
            stop = self._flow(at, path, top.indent, 0)
            return self._line_of(stop, number) + 1
        self.out.words.append(Word(path, (at, self._plain_end(at, end))))
        return number + 1

    def _value(self, entry: Entry, number: int, indent: int) -> int:
        """Reads what follows a colon or a dash; returns the number of the next line."""
        at, end = entry.value[0], self.lines[number][1]
        if at == end or self.source[at] == "#":
            return number + 1
        first = self.source[at]
        last = number
        if first in "[{":
            stop = self._flow(at, entry.path, indent, 0)
            entry.open, entry.flow, last = True, True, self._line_of(stop, number)
        elif first in "|>":
            while last + 1 < len(self.lines) and self._goes_on(last + 1, indent):
                last += 1
            stop = self.lines[last][1]
        elif first in "\"'" and (closed := _CLOSED.match(self.source, at, end)):
            stop = closed.end()
        else:
            stop = self._plain_end(at, end)
        entry.value = (at, stop)
        self._extend(stop)
        return last + 1

    def _goes_on(self, number: int, indent: int) -> bool:
        """Whether a line is blank, or indented further."""
        start, end = self.lines[number]
        at = self._skip_blanks(start, end)
        return at == end or at - start > indent

    def _plain_end(self, at: int, end: int) -> int:
        comment = _COMMENT.search(self.source, at, end)
        stop = comment.start() if comment else end
        return at + len(self.source[at:stop].rstrip())

    def _line_of(self, offset: int, number: int) -> int:
        while number + 1 < len(self.lines) and self.lines[number + 1][0] <= offset:
            number += 1
        return number

    def _flow(self, at: int, path: Path, indent: int, depth: int) -> int:
        """Reads a list in brackets or a mapping in braces; returns where it ends.

        One that is not closed ends before the next line that is indented no further than what it belongs to.
        """
        is_map = self.source[at] == "{"
        index, at, end = 0, at + 1, len(self.source)
        fresh = True
        while True:
            following = self._gap(at, indent)
            if following is None:
                return at
            at = following
            if at >= end or self.source[at] in "]}":
                return min(at + 1, end)
            if self.source[at] == ",":
                index, at, fresh = index + 1, at + 1, True
                continue
            if not fresh:
                # What follows a value without a comma: passed over, but never forever.
                index += 1
            stop = self._flow_key(at, path, indent, depth) if is_map else 0
            if not is_map:
                entry = Entry((*path, index), None, (at, at), flow=True)
                self.out.entries.append(entry)
                stop = self._flow_value(entry, at, indent, depth)
            fresh = False
            at = max(stop, at + 1)

    def _flow_key(self, at: int, path: Path, indent: int, depth: int) -> int:
        match = _CLOSED.match(self.source, at) or _FLOW_PLAIN.match(self.source, at)
        assert match is not None
        stop = at + len(match[0].rstrip())
        colon = self._skip_blanks(stop, len(self.source))
        if self.source[colon : colon + 1] != ":":
            self.out.words.append(Word(path, (at, stop), flow=True))
            return stop
        value = self._skip_blanks(colon + 1, len(self.source))
        entry = Entry((*path, _name(self.source[at:stop])), (at, stop), (value, value), flow=True)
        self.out.entries.append(entry)
        return self._flow_value(entry, value, indent, depth)

    def _flow_value(self, entry: Entry, at: int, indent: int, depth: int) -> int:
        first = self.source[at : at + 1]
        if first and first in "[{" and depth < MOST_DEEP:
            entry.open = True
            stop = self._flow(at, entry.path, indent, depth + 1)
        else:
            closed = _CLOSED.match(self.source, at) or _FLOW_PLAIN.match(self.source, at)
            stop = at + len(closed[0].rstrip()) if closed else at
        entry.value = (at, stop)
        return stop

    def _gap(self, at: int, indent: int) -> int | None:
        """Where the next thing within brackets starts; None where the brackets end without being closed."""
        while at < len(self.source):
            if self.source[at] in " \t":
                at += 1
            elif self.source[at] == "#":
                found = _BREAK.search(self.source, at)
                at = found.start() if found else len(self.source)
            elif found := _BREAK.match(self.source, at):
                start = found.end()
                following = self._skip_blanks(start, len(self.source))
                ended = following < len(self.source) and not _BREAK.match(self.source, following)
                if ended and following - start <= indent and self.source[following] not in "]}#":
                    return None
                at = start
            else:
                return at
        return at


def _is_within(path: Path, section: Entry) -> bool:
    above = section.path
    return len(above) < len(path) and path[: len(above)] == above


def _name(text: str) -> str:
    return str(value_of(text)) if text[:1] in ("'", '"') else text.strip()
