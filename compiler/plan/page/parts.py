"""A whole in parts, as the rows of a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from recipec.compiler.plan.page.numbers import percent


@dataclass(frozen=True)
class Part:
    """A row: `kind` is its class in the style sheet, `size` the number of which `amount` is the text."""

    kind: str
    name: str
    meaning: str
    size: float
    amount: str
    share: str


def rows(
    sizes: Iterable[tuple[str, str, str, float]], whole: float, said: Callable[[float], str]
) -> list[Part]:
    """The rows of (kind, name, meaning, size), each with its share of the whole.

    Args:
        said: writes a size with its unit.
    """
    return [
        Part(kind, name, meaning, size, said(size), percent(size / whole))
        for kind, name, meaning, size in sizes
    ]
