"""Read a shell script as syntax: its commands as words with their places, and the values of its variables.

Nothing is run. Some values are known only in a run: arguments of the script, `$(...)`, loop variables, the
environment. The name of such a value stands between two marks in the word; `shown` writes it as `${NAME}`.
The folder of the script is known, and so is what `dirname`, `realpath` and `cd ... && pwd` make of it.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

MARKS = ("\ue000", "\ue001")
"""Encloses the name of an unknown value. The same character is removed from the script itself."""
SPACE = "\ue002"
"""Stands for a space in such a name, so that it does not split the word."""
MOST = 4 << 20
"""The most characters that all expansions of a script may produce."""
DEEPEST = 16
"""The most nested expansions and `eval`s."""
MOST_OPEN = 64
"""The most nested quotes and brackets."""
WATCHED = ("CUDA_VISIBLE_DEVICES", "NPROC_PER_NODE", "NNODES")
"""The variables that launchers read."""

_MARKED = re.compile(f"{MARKS[0]}([^{MARKS[1]}]*){MARKS[1]}")
_NAME = re.compile(r"[A-Za-z_]\w*")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_PLAIN = re.compile(r"[^\s;&|()<>\\'\"$`]+")
_REDIRECTION = re.compile(r"\d*(<<<|<<-?|&>>?|[<>]&-?|>>|>\||[<>])")
_PARAMETER = re.compile(r"(\w+)(\[[@*0]\])?(?::?[-=](.*))?", re.DOTALL)
_PLACE = re.compile(
    r"\s*(?:cd (?:-- )?(?P<cd>.+?)\s*(?:>\s*/dev/null\s*(?:2>&1\s*)?)?&&\s*pwd(?: -P)?"
    r"|(?P<dirname>dirname) (?:-- )?(?P<of>.+?)|(?:realpath|readlink -f) (?P<real>.+?))\s*"
)
"""Matches commands that write a folder or the path of a file."""
_SECRET = re.compile(r"token|secret|passw|api_?key|credential|access_?key", re.IGNORECASE)
_OPEN = {"if": "fi", "case": "esac", "for": "done", "while": "done", "until": "done", "select": "done"}
_PREFIXES = {"then", "do", "else", "elif", "if", "while", "until", "{", "!", "time", "$", "function"}
_DECLARES = {"export", "local", "declare", "readonly", "typeset"}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}


@dataclass(frozen=True)
class Word:
    """A word of a command, and the range of the text that it comes from."""

    text: str
    at: int
    end: int


@dataclass(frozen=True)
class Statement:
    """A simple command.

    Attributes:
        words: the words, the command's name first.
        watched: the variables that launchers read, as far as the script sets them.
        folder: the folder that `cd` changed to, "" for the folder in which the script starts.
    """

    words: tuple[Word, ...]
    watched: dict[str, str]
    folder: str


@dataclass(frozen=True)
class Written:
    """A file that a heredoc writes: its text, and where the text begins."""

    text: str
    at: int


class Unreadable(Exception):
    """The script ends inside an open quote or bracket, or expands to too much text."""

    def __init__(self, message: str, at: int) -> None:
        super().__init__(message)
        self.at = at


def shown(text: str) -> str:
    """Return a word's text, with `${NAME}` for unknown values."""
    return _MARKED.sub(lambda match: f"${{{match[1]}}}", text).replace(SPACE, " ")


def unknown(text: str) -> str | None:
    """Return the first unknown part of a word as written in the script ("$1", "$(nproc)"), or None."""
    match = _MARKED.search(text)
    if match is None:
        return None
    name = match[1].replace(SPACE, " ")
    return f"${name}" if re.fullmatch(r"\w+|\W|\(.*", name) else f"${{{name}}}"


def _marked(name: str) -> str:
    flat = SPACE.join(re.sub(f"[{{}}{MARKS[0]}{MARKS[1]}]", "", name).split())
    return f"{MARKS[0]}{flat[:60]}{MARKS[1]}"


@dataclass
class Shell:
    """A script that is being read.

    Attributes:
        variables: their values; an array's value is its words.
        statements: the simple commands so far, in the order of the text.
        written: the files that heredocs write, by name.
        place: for a text that `eval` or `bash -c` reads: its range in the script.
    """

    text: str
    variables: dict[str, str | list[Word]] = field(default_factory=dict)
    statements: list[Statement] = field(default_factory=list)
    written: dict[str, Written] = field(default_factory=dict)
    place: tuple[int, int] | None = None
    depth: int = 0
    at: int = 0
    folder: str = ""
    spent: int = 0

    def __post_init__(self) -> None:
        self.words: list[Word] = []
        self.before: dict[str, str | list[Word] | None] = {}
        self.blocks: list[dict[str, str | list[Word] | None]] = []
        self.heredocs: list[tuple[str, bool, bool, int]] = []
        self.target = ""
        self.open = 0

    def read(self) -> Shell:
        """Read the whole script.

        Raises:
            Raises:
        """
        while self.at < len(self.text):
            character = self.text[self.at]
            if character in " \t\r" or self.text.startswith("\\\n", self.at):
                self.at += 2 if character == "\\" else 1
            elif character == "#":
                end = self.text.find("\n", self.at)
                self.at = end if end >= 0 else len(self.text)
            elif character == "\n":
                self.at += 1
                self._bodies()
                self._finish()
            elif match := _REDIRECTION.match(self.text, self.at):
                self._redirect(match[1], match.end())
            elif character in ";&|()":
                self.at += 1
                if not self.heredocs:
                    self._finish()
            elif (match := _ASSIGNMENT.match(self.text, self.at)) and self._assigns():
                self._assign(match[1], bool(match[2]), match.end())
            else:
                self.words += self._word()
        self._finish()
        return self

    def _assigns(self) -> bool:
        return all(word.text in _PREFIXES | _DECLARES or word.text.startswith("-") for word in self.words)

    def _span(self, start: int) -> tuple[int, int]:
        return self.place or (start, self.at)

    def _assign(self, name: str, adds: bool, at: int) -> None:
        self.at = at
        value: str | list[Word]
        old = self.variables.get(name)
        if self.text.startswith("(", at):
            value = self._array(at)
            value = [*old, *value] if adds and isinstance(old, list) else value
        else:
            value = "".join(word.text for word in self._word(splits=False))
            value = old + value if adds and isinstance(old, str) else value
        self.before.setdefault(name, old)
        self._hold(name, "***" if _SECRET.search(name) and value else value)

    def _hold(self, name: str, value: str | list[Word] | None) -> None:
        if value is None:
            self.variables.pop(name, None)
        else:
            self.variables[name] = value

    def _array(self, start: int) -> list[Word]:
        self.at, words = start + 1, list[Word]()
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at] in " \t\r\n;&|<>(" or self.text.startswith("\\\n", self.at):
                self.at += 1
            elif self.text[self.at] == "#":
                self.at = max(self.text.find("\n", self.at), self.at + 1)
            else:
                words += self._word()
        if self.at >= len(self.text):
            raise Unreadable("the `(` that opens here is not closed", start)
        self.at += 1
        return words

    def _redirect(self, sign: str, end: int) -> None:
        self.at = end
        while self.at < len(self.text) and self.text[self.at] in " \t":
            self.at += 1
        start = self.at
        words = self._word() if self.text[start : start + 1] not in ("(", "", "\n") else []
        name = words[0].text if words else ""
        if sign.startswith("<<") and sign != "<<<":
            quoted = self.text[start : start + 1] in "'\"\\"
            self.heredocs.append((name, quoted, sign.endswith("-"), start))
        elif sign in (">", ">>", ">|"):
            self.target = name

    def _bodies(self) -> None:
        """Read the heredocs of the line that just ended."""
        for name, quoted, tabs, opened in self.heredocs:
            start, lines = self.at, list[str]()
            while True:
                end = self.text.find("\n", self.at)
                line = self.text[self.at : end if end >= 0 else len(self.text)]
                bare = line.lstrip("\t") if tabs else line
                if bare.rstrip("\r") == name:
                    break
                if end < 0:
                    raise Unreadable(f"the heredoc that ends with `{name}` is not closed", opened)
                lines.append(bare)
                self.at = end + 1
            self.at = end + 1 if end >= 0 else len(self.text)
            body = "\n".join(lines)
            tee = next((word.text for word in self.words[1:] if not word.text.startswith("-")), "")
            target = self.target or (tee if self.words and self.words[0].text == "tee" else "")
            if target:
                self.written[target] = Written(body if quoted else self._expanded(body), start)
        self.heredocs = []

    def _finish(self) -> None:
        words, before = self.words, self.before
        self.words, self.before, self.target = [], {}, ""
        while words and words[0].text in {*_PREFIXES, *_OPEN.values(), "for", "case", "select"}:
            first = words.pop(0).text
            if first in _OPEN:
                self.blocks.append({})
            elif first in ("else", "elif") and self.blocks:
                for name, old in self.blocks[-1].items():
                    self._hold(name, old)
            elif first in _OPEN.values() and self.blocks:
                for name in self.blocks.pop():
                    self.variables[name] = _marked(name)
            if first in ("for", "select") and words:
                before[words[0].text] = None
                self.variables[words[0].text] = _marked(words[0].text)
                words = []
        if self.blocks and (not words or words[0].text in _DECLARES or not before):
            for name, old in before.items():
                self.blocks[-1].setdefault(name, old)
        if not words or words[0].text in _DECLARES:
            return
        watched = {name: held for name in WATCHED if isinstance(held := self.variables.get(name), str)}
        for name, old in before.items():
            self._hold(name, old)
        if words[0].text == "cd" and len(words) > 1:
            place = words[1].text
            self.folder = "" if unknown(place) else str(PurePosixPath(self.folder, place))
            return
        texts = [word.text for word in words]
        shell = next(
            (i for i, text in enumerate(texts) if text in ("bash", "sh") and "-c" in texts[i:]), None
        )
        if texts[0] == "eval" or shell is not None:
            after = 1 if texts[0] == "eval" else texts.index("-c", shell or 0) + 1
            rest = words[after:] if texts[0] == "eval" else words[after : after + 1]
            self._inner(rest)
            return
        self.statements.append(Statement(tuple(words), watched, self.folder))

    def _inner(self, words: list[Word]) -> None:
        """Read the text given to `eval` or `bash -c`. All of it has the place of its first word."""
        if not words or self.depth >= DEEPEST:
            return
        at = words[0].at
        inner = Shell(" ".join(word.text for word in words), self.variables, self.statements, self.written)
        inner.place, inner.depth, inner.folder = (at, words[-1].end), self.depth + 1, self.folder
        try:
            inner.read()
        except Unreadable as error:
            raise Unreadable(str(error), at) from None

    def _word(self, splits: bool = True) -> list[Word]:
        start, words, current = self.at, list[Word](), None
        while self.at < len(self.text):
            character = self.text[self.at]
            if match := _PLAIN.match(self.text, self.at):
                current, self.at = (current or "") + match[0], match.end()
            elif character == "\\":
                taken = self.text[self.at + 1 : self.at + 2]
                current = (current or "") + ("" if taken == "\n" else taken)
                self.at += 2
            elif character == "'":
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise Unreadable("the quote that opens here is not closed", self.at)
                current, self.at = (current or "") + self.text[self.at + 1 : end], end + 1
            elif character in '"$`':
                value = self._double() if character == '"' else self._expansion()
                if isinstance(value, list):
                    words += value
                elif character == '"' or not splits:
                    current = (current or "") + value
                else:
                    first, *rest = re.split(r"[ \t\n]+", value)
                    current = (current or "") + first if current or first else None
                    for part in rest:
                        words += [Word(current, *self._span(start))] if current is not None else []
                        current = part or None
            else:
                break
        if self.at == start:  # for example a bracket that has no meaning here
            self.at += 1
        return words if current is None else [*words, Word(current, *self._span(start))]

    def _double(self) -> str | list[Word]:
        start, text = self.at, ""
        self.open += 1
        if self.open > MOST_OPEN:
            raise Unreadable("quotes and brackets are nested too deep", start)
        self.at += 1
        while self.at < len(self.text):
            character = self.text[self.at]
            if character == '"':
                self.at += 1
                self.open -= 1
                return text
            if character == "\\" and self.text[self.at + 1 : self.at + 2] in tuple('$`"\\\n'):
                text += self.text[self.at + 1].strip("\n")
                self.at += 2
            elif character in "$`":
                value = self._expansion()
                if isinstance(value, list) and not text and self.text.startswith('"', self.at):
                    self.at += 1
                    self.open -= 1
                    return value
                text += " ".join(word.text for word in value) if isinstance(value, list) else value
            else:
                text += character
                self.at += 1
        raise Unreadable("the quote that opens here is not closed", start)

    def _expansion(self) -> str | list[Word]:
        start = self.at
        if self.text[start] == "`":
            end = self.text.find("`", start + 1)
            if end < 0:
                raise Unreadable("the backquote that opens here is not closed", start)
            self.at = end + 1
            return _marked(f"({self.text[start + 1 : end]})")
        following = self.text[start + 1 : start + 2]
        if following in ("(", "{"):
            inner = self._bracketed(start + 1, following)
            if following == "{":
                return self._parameter(inner)
            if inner.startswith("(") and inner.endswith(")"):
                return self._number(inner[1:-1])
            return self._written_place(inner) or _marked(f"({inner})")
        if following == "'":
            self.at += 1
            return ""
        match = _NAME.match(self.text, start + 1) or re.compile(r"[0-9@*#?]").match(self.text, start + 1)
        if match is None:
            self.at += 1
            return "$"
        self.at = match.end()
        return self._value(match[0])

    def _written_place(self, command: str) -> str | None:
        """Return what a command writes that names a place from the root; None if it is not known."""
        match = _PLACE.fullmatch(command)
        if match is None or self.depth >= DEEPEST:
            return None
        text = (match["cd"] or match["of"] or match["real"]).strip()
        inner = Shell(text, self.variables, depth=self.depth + 1, spent=self.spent)
        directory = "".join(word.text for word in inner._word(splits=False))
        self.spent = inner.spent
        if inner.at < len(text) or unknown(directory) or not directory.startswith("/"):
            return None
        return posixpath.dirname(directory) if match["dirname"] else posixpath.normpath(directory)

    def _bracketed(self, start: int, opening: str) -> str:
        """Return the text between a bracket and its closing bracket."""
        closing, depth, at = {"(": ")", "{": "}"}[opening], 0, start
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            elif character == "'" and opening == "(":
                at = max(self.text.find("'", at + 1), at)
            elif character == '"':
                self.at = at
                self._double()
                at = self.at - 1
            depth += (character == opening) - (character == closing)
            if depth == 0:
                self.at = at + 1
                return self.text[start + 1 : at]
            at += 1
        raise Unreadable(f"the `{opening}` that opens here is not closed", start)

    def _parameter(self, inner: str) -> str | list[Word]:
        match = _PARAMETER.fullmatch(inner)
        if match is None:
            return _marked(inner)
        name, default = match[1], match[3]
        if default is not None and name not in self.variables:
            return self._expanded(default.strip("\"'") if default[:1] == default[-1:] else default)
        value = self._value(name)
        if isinstance(value, list) and match[2] in (None, "[0]"):
            return value[0].text if value else ""
        return value

    def _value(self, name: str) -> str | list[Word]:
        value = self.variables.get(name, _marked(name))
        self.spent += len(value) if isinstance(value, str) else sum(len(word.text) + 1 for word in value)
        if self.spent > MOST:
            raise Unreadable("the variables expand to more text than any command has", self.at)
        return value

    def _expanded(self, text: str) -> str:
        if self.depth >= DEEPEST:
            return _marked("...")
        inner = Shell(text, self.variables, depth=self.depth + 1, spent=self.spent)
        expanded = ""
        while inner.at < len(text):
            character = text[inner.at]
            if character == "$":
                value = inner._expansion()
                expanded += " ".join(word.text for word in value) if isinstance(value, list) else value
            else:
                escaped = character == "\\" and text[inner.at + 1 : inner.at + 2] in ("$", "`", "\\")
                expanded += text[inner.at + escaped]
                inner.at += 1 + escaped
        self.spent = inner.spent
        return expanded

    def _number(self, text: str) -> str:
        """Evaluate `$((...))` over known whole numbers."""
        bare = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\}?", r"${\1}", text)
        filled = self._expanded(bare).replace("//", "").replace("/", "//")
        if not re.fullmatch(r"[\d\s+\-*/()]+", filled):
            return _marked(f"(({text}))")
        try:
            return str(_calculated(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
            return _marked(f"(({text}))")


def _calculated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 1 << 32:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_calculated(node.left), _calculated(node.right))
    raise ValueError
