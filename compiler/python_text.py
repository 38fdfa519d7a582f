"""Write Python source of plain values in the layout of `ruff format`.

A value stays on one line if it fits in WIDTH columns. Otherwise every item gets a line of its own and a
trailing comma, which formatters keep.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

WIDTH = 88
"""Columns of a generated line: the default of ruff and black."""

INDENT = 4


@dataclass(frozen=True)
class Name:
    """An expression that is written unchanged: a constant's name, `range(3)`."""

    text: str


@dataclass(frozen=True)
class Call:
    """A call with keyword arguments. An argument is positional if its key starts with "*"."""

    function: str
    arguments: Mapping[str, Value]


Value = (
    None
    | bool
    | int
    | float
    | str
    | tuple["Value", ...]
    | list["Value"]
    | Mapping[str, "Value"]
    | Name
    | Call
)


def assignment(name: str, value: Value) -> str:
    """Return the statement `name = value`."""
    text = source(value, column=len(name) + 3)
    line = f"{name} = {text}"
    if "\n" in text or columns(line) <= WIDTH or INDENT + columns(text) > WIDTH:
        return line
    return f"{name} = (\n{' ' * INDENT}{text}\n)"


def statement(prefix: str, value: Value, indent: int = 0) -> str:
    """Return `prefix value`, for example a return statement, at `indent`."""
    return " " * indent + prefix + source(value, indent=indent, column=indent + len(prefix))


def source(value: Value, *, indent: int = 0, column: int = 0, trailing: int = 0) -> str:
    """Return the source of a value.

    Args:
        indent: the indentation of the line that the value starts on, in columns.
        column: the column at which the value starts.
        trailing: columns that must stay free after it, for a comma.
    """
    flat = _flat(value)
    if column + columns(flat) + trailing <= WIDTH:
        return flat
    opening, items, closing = _parts(value)
    if not items:
        return flat
    inner = indent + INDENT
    lines = []
    for prefix, item in items:
        text = source(item, indent=inner, column=inner + columns(prefix), trailing=1)
        lines.append(f"{' ' * inner}{prefix}{text},\n")
    return f"{opening}\n{''.join(lines)}{' ' * indent}{closing}"


def _flat(value: Value) -> str:
    if isinstance(value, Name):
        return value.text
    if isinstance(value, str):
        return string(value)
    if isinstance(value, float):
        return number(value)
    if value is None or isinstance(value, int):
        return repr(value)
    opening, items, closing = _parts(value)
    comma = "," if isinstance(value, tuple) and len(items) == 1 else ""
    return opening + ", ".join(prefix + _flat(item) for prefix, item in items) + comma + closing


def _parts(value: Value) -> tuple[str, list[tuple[str, Value]], str]:
    """Return the opening bracket, the items with the text before each, and the closing bracket."""
    if isinstance(value, Call):
        items = [("" if key.startswith("*") else f"{key}=", item) for key, item in value.arguments.items()]
        return f"{value.function}(", items, ")"
    if isinstance(value, tuple | list):
        opening, closing = "()" if isinstance(value, tuple) else "[]"
        return opening, [("", item) for item in value], closing
    if isinstance(value, Mapping):
        return "{", [(f"{string(key)}: ", item) for key, item in value.items()], "}"
    return "", [], ""


def columns(text: str) -> int:
    """Return the columns that a text takes on a screen: East Asian wide characters take two."""
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(character) in "WF" for character in text)
    combining = sum(unicodedata.combining(character) > 0 for character in text)
    return len(text) + wide - combining


def number(value: float) -> str:
    """Write a float as a person would: 64.0, 0.05, 1e-4."""
    if not 0 < abs(value) < 1e-3:
        return repr(value).replace("e+", "e")
    scientific = next(text for places in range(17) if float(text := f"{value:.{places}e}") == value)
    digits, _, exponent = scientific.partition("e")
    return f"{digits}e{int(exponent)}"


def string(value: str, quote: str | None = None) -> str:
    """Return a string literal, in double quotes unless that needs more escapes or `quote` asks for others."""
    quote = quote or ("'" if value.count('"') > value.count("'") else '"')
    return quote + "".join(_character(character, quote) for character in value) + quote


def docstring(text: str) -> str:
    """Return a line of text escaped for use within a docstring."""
    escaped = "".join(_character(character, "") for character in text)
    return escaped.replace('"""', '\\"\\"\\"')


def _character(character: str, quote: str) -> str:
    if character in {quote, "\\"}:
        return "\\" + character
    if character.isprintable():
        return character
    return repr(character)[1:-1]
