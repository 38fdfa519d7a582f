"""The values that the expressions of a script have, as far as the script alone determines them."""

from __future__ import annotations

import ast
import posixpath
from collections import ChainMap
from dataclasses import dataclass, field, replace
from typing import Any

from recipec.port.meaning.scripts import ByHand, Chat, Column, Columns, End, Text

LONGEST = 100_000
"""The most characters of a text."""
NOTHING = object()
"""The result of a block that does not return."""
PLAIN = (str, int, float, bool, type(None), list, tuple, dict)


@dataclass(frozen=True)
class Unknown:
    """A value that the script alone does not determine, and the reason."""

    why: str


@dataclass(frozen=True)
class Known:
    """A name of a library, "torch.bfloat16"."""

    name: str


@dataclass(frozen=True)
class Arg:
    """An argument: its value, its expression, and its keyword."""

    value: Any
    node: ast.expr
    key: ast.AST


@dataclass(eq=False)
class Made:
    """The result of a known constructor: its kind ("model", "lora", "SFTConfig", ...), and its arguments.

    Attributes:
        rows: the columns that functions make of a data set's rows.
        steps: the functions over rows that are not followed.
        told: what the script says of it in other places.
        origin: what all copies of it have in common.
    """

    kind: str
    args: dict[str, Arg]
    node: ast.AST
    rows: dict[str, Any] = field(default_factory=dict)
    steps: tuple[ByHand | Columns, ...] = ()
    told: dict[str, Arg] = field(default_factory=dict)
    origin: object = field(default_factory=object)

    def but(self, **changes: Any) -> Made:
        """Return a copy with some values changed."""
        return replace(self, **{"args": dict(self.args), "rows": dict(self.rows), **changes})


@dataclass(frozen=True)
class Function:
    """A function or a class of the script, and the variables of the surrounding scopes."""

    node: Any
    around: ChainMap[str, Any]


@dataclass(frozen=True, eq=False)
class Row:
    """A row of a data set. Only the columns that functions have made are known."""

    columns: dict[str, Any]


def above(path: str) -> str:
    """Return the folder of a file, or the folder that contains a folder."""
    return posixpath.normpath(posixpath.join(path, ".."))


def spoil(owner: list[Any] | dict[Any, Any], why: Unknown) -> Unknown:
    """Make a list or a dictionary unknown after a change that could not be followed."""
    owner.clear()
    if isinstance(owner, list):
        owner.append(why)
    else:
        owner["..."] = why
    return why


def relabeled(where: Any, value: Any) -> bool:
    """Return whether tokens get labels other than their own ids, or are changed in another way."""
    return isinstance(where, Made) and where.kind == "tokens" and getattr(value, "kind", "") != "ids"


def same(first: Any, second: Any) -> bool:
    return type(first) is type(second) and isinstance(first, PLAIN) and bool(first == second)


def first_made(values: list[Any]) -> Any:
    """Return the value that one branch makes, such as a tokenizer, if no other branch makes another one."""
    instances = [value for value in values if isinstance(value, Made | Function | Known)]
    return (
        instances[0]
        if instances
        and all(value is NOTHING or value in instances for value in values)
        and len(instances) == 1
        else None
    )


def text_of(values: list[Any]) -> Any:
    """Join values into one text: a str if all of it is known, else a Text; None if a part is not text."""
    text = Text.of(str(v) if isinstance(v, int | float) else v for v in values)
    if text is None:
        return None
    if all(isinstance(piece, str) for piece in text.pieces):
        whole = "".join(map(str, text.pieces))
        return whole if len(whole) <= LONGEST else None
    merged: list[Any] = []
    for piece in text.pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    return Text(tuple(merged))


def has_unknown(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_unknown, value.values()))
    if isinstance(value, list | tuple):
        return any(map(has_unknown, value))
    return not isinstance(value, str | Text | Column | Chat | End | int | float | bool | None)


def columns_of(out: Any, row: Row, batched: bool) -> dict[str, Any] | None:
    """Return the columns that a function over rows makes, or None if it does not return a row."""
    if isinstance(out, Row):
        out = out.columns
    if not isinstance(out, dict):
        return None
    taken = {
        key: value[0] if batched and isinstance(value, list) and len(value) == 1 else value
        for key, value in out.items()
    }
    return {str(key): value for key, value in taken.items()}


def joined(data_sets: list[Any]) -> Made | None:
    """Concatenate data sets, or return None if they differ in their form."""
    if not all(isinstance(data_set, Made) and data_set.kind in ("data", "all") for data_set in data_sets):
        return None
    first = data_sets[0]
    alike = all(data_set.rows == first.rows and data_set.steps == first.steps for data_set in data_sets)
    return (
        first.but(told={**first.told, "others": Arg(data_sets[1:], first.node, first.node)})
        if alike
        else None
    )
