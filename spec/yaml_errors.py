"""Explain ruamel.yaml's syntax errors in plain words, at the most likely position of the mistake."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ruamel.yaml.error import MarkedYAMLError

from recipec.spec.codes import Code


@dataclass(frozen=True)
class Explanation:
    """A message, and its position: line and column are 0-based."""

    code: Code
    message: str
    help: str
    line: int
    column: int


_NO_KEY = "this line is not `key: value`"
_NO_KEY_HELP = "put a colon and a space after the key"

_PROBLEMS: list[tuple[str, str, str]] = [
    (
        "mapping values are not allowed",
        "a second colon in one line",
        'put quotes around text that contains ": "',
    ),
    ("could not find expected ':'", _NO_KEY, _NO_KEY_HELP),
    ("found unexpected end of stream", "the quote that opens here is not closed", "close it"),
    (r"'\t' that cannot start", "a tab is here; only spaces separate values", "replace it with a space"),
    ("cannot start any token", "this character cannot start a value", "put quotes around the value"),
    (
        "expected ',' or ']'",
        "the list that opens here is not closed, or a comma is missing",
        "add `]` or `,`",
    ),
    (
        "expected ',' or '}'",
        "the mapping that opens here is not closed, or a comma is missing",
        "add `}` or `,`",
    ),
    (
        "expected <block end>",
        "the indentation does not fit the lines above",
        "align it with the lines around it",
    ),
    (
        "unknown escape character",
        "no such escape in double quotes",
        "use single quotes, or double the backslash",
    ),
    ("found undefined alias", "the alias has no anchor", "write the value out"),
    ("found undefined tag handle", "the tag is not known", "remove the tag"),
    ("expected the node content", "a value is missing here", "add a value, or remove the character shown"),
    ("found duplicate anchor", "an anchor is given twice", "remove the anchors"),
    ("found duplicate %YAML", "a second %YAML line", "remove both"),
    ("scanning an anchor", "the anchor has no name", "remove the `&`"),
    ("scanning an alias", "the alias has no name", "remove the `*`"),
    (
        "scanning a block scalar",
        "only + or - and one digit may follow `|` or `>`",
        "start the text on the next line",
    ),
    (
        "scanning a directive",
        "a line cannot start with `%`",
        "put quotes around the value, or remove the line",
    ),
    ("a tag", "the tag cannot be read", "remove the tag, or put quotes around the value"),
]
"""A part of ruamel's problem and context, the message, and its help."""

UNCLEAR = "put quotes around the value, or check for a missing quote, bracket or colon just before it"
"""The help for an error that ruamel does not explain further."""

_AT_START = (
    "found unexpected end of stream",
    "expected ',' or ']'",
    "expected ',' or '}'",
    "could not find expected",
)
"""Problems that are shown where the construct starts, not where reading stopped."""


E0006 = Code(
    "E0006",
    "not valid YAML",
    cause="The text breaks YAML's grammar at the place shown. The mistake may be a line above it.",
    cure="Look for a missing colon, a missing space after a colon, an unclosed quote or bracket, or "
    "uneven indentation.",
)

E0007 = Code(
    "E0007",
    "tab in the indentation",
    cause="YAML allows only spaces as indentation.",
    cure="Replace each tab with two spaces.",
)


def explain(error: MarkedYAMLError, lines: Sequence[str]) -> Explanation:
    """Explain the error in words.

    Args:
        lines: lines of the text.
    """
    problem = " ".join(f"{error.problem or ''} {error.context or ''}".split())
    at_start = any(sign in problem for sign in _AT_START)
    mark = (error.context_mark if at_start else None) or error.problem_mark or error.context_mark
    line, column = (mark.line, mark.column) if mark is not None else (0, 0)
    closing = re.search(r"expected ',' or '([\]}])'", problem)
    if closing and error.problem_mark is not None and _within_json(lines, error.problem_mark.line):
        line, column = error.problem_mark.line, error.problem_mark.column
        # A number continues over the next key: reading stopped at that key's colon.
        key = re.search(r'"[^"]*"\s*$', lines[line][:column]) if lines[line][column:][:1] == ":" else None
        message = f"not valid YAML: `,` or `{closing[1]}` is missing before this"
        help = f"add `,` or `{closing[1]}`, or `:` after a key"
        return Explanation(E0006, message, help, line, key.start() if key else column)
    if error.problem_mark is not None and "\t" in _indentation(lines, error.problem_mark.line):
        line = error.problem_mark.line
        message = "this line is indented with a tab; YAML allows only spaces"
        column = _indentation(lines, line).index("\t")
        return Explanation(E0007, message, "replace each tab with two spaces", line, column)
    if line >= len(lines) or not lines[line].strip():
        line = max((i for i, text in enumerate(lines[: line + 1]) if text.strip()), default=0)
        column = len(lines[line].rstrip())
    if "mapping values are not allowed" in problem and ": " not in lines[line][:column]:
        # A plain value continues over several lines: the line before took this key as its continuation.
        before = max((i for i, text in enumerate(lines[:line]) if text.strip()), default=None)
        if before is not None and ": " not in lines[before]:
            indent = len(_indentation(lines, before))
            return Explanation(E0006, f"not valid YAML: {_NO_KEY}", _NO_KEY_HELP, before, indent)
    for sign, message, help in _PROBLEMS:
        if sign in problem:
            return Explanation(E0006, f"not valid YAML: {message}", help, line, column)
    return Explanation(E0006, f"not valid YAML: {problem}", UNCLEAR, line, column)


def _within_json(lines: Sequence[str], line: int) -> bool:
    """Return whether the whole text is one mapping or list in brackets, like JSON, and is still open at a
    line.

    Reading then stopped at the mistake itself. In other texts it continues past the mistake, over lines that
    do not belong to the open bracket.
    """
    first = next((text.lstrip("\ufeff") for text in lines if text.strip() and text[:1] != "#"), "")
    return first.startswith(("{", "[")) and any(text.strip() for text in lines[line:])


def _indentation(lines: Sequence[str], line: int) -> str:
    text = lines[line] if line < len(lines) else ""
    return text[: len(text) - len(text.lstrip())]
