"""Tell from the names of two sources which rows they have in common, without reading them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipec.spec.language import Source

PART = re.compile(
    r"(?P<name>\w+(?:[.-]\w+)*)(?:\[(?P<first>-?[\d_]+%?)?:(?P<stop>-?[\d_]+%?)?\])?"
    r"(?:\((?:closest|pct1_dropremainder)\))?"
)
"""A part of a split, as datasets.ReadInstruction.from_spec reads it."""

Place = tuple[str, int]
"""A place between rows: of the start, or of the end (then not positive), in rows or in percent."""

START: Place = ("rows", 0)
END: Place = ("rows from the end", 0)


@dataclass(frozen=True)
class Rows:
    """A stretch of a split's rows."""

    split: str
    first: Place
    stop: Place


@dataclass(frozen=True)
class Shared:
    """What two sources have in common.

    Attributes:
        rows: "all" of the second source's rows, or "some" of them; "unknown" if that depends on the number of
            rows.
        revision: whether the two are revisions of a data set that may differ.
    """

    rows: str
    revision: bool = False


def shared(first: Source, second: Source) -> Shared | None:
    """Return which rows of the second source are in the first one, None for none as far as the names tell.

    Rows of files of other names are not compared.
    """
    here, there = _place(first.path), _place(second.path)
    if here[0] != there[0] or first.config != second.config:
        return None
    revision = here[1] != there[1]
    (parts, exact), (others, also) = _parts(first), _parts(second)
    if not parts or not others:
        return Shared("unknown", revision)
    if parts == others and exact and also:
        return Shared("all", revision)
    inside = [[_relation(part, other) for part in parts] for other in others]
    overlaps = {relation for relations in inside for relation in relations}
    if overlaps == {"none"}:
        return None
    if not (exact and also):  # a limit ends the parts somewhere
        return Shared("some" if _begin_alike(parts[0], others[0]) else "unknown", revision)
    if all("all" in relations for relations in inside):
        return Shared("all", revision)
    return Shared("some" if overlaps & {"all", "some"} else "unknown", revision)


def complement(split: str | None) -> str | None:
    """Return the split of the rows that a beginning or an end of a split leaves, None for other splits."""
    part = PART.fullmatch((split or "").replace(" ", ""))
    if part is None or (part["first"] is None) == (part["stop"] is None):
        return None
    rest = f"{part['stop']}:" if part["first"] is None else f":{part['first']}"
    return f"{part['name']}[{rest}]"


def _place(path: str) -> tuple[str, str]:
    """Return what a path names, and its revision."""
    if path.startswith("hf://"):
        match = re.fullmatch(r"(hf://(?:datasets/)?[^/@]+(?:/[^/@]+)?)(?:@([^/]+))?(/.*)?", path)
        if match is not None:
            return match[1] + (match[3] or ""), match[2] or "main"
    return (path if "://" in path else os.path.normpath(path)), ""


def _begin_alike(left: Rows, other: Rows) -> bool:
    """Return whether two stretches have their first row in common."""
    return left.split == other.split and any(place in [*_same(other.first)] for place in _same(left.first))


def _parts(source: Source) -> tuple[list[Rows], bool]:
    """Return the rows of a source, and whether these are exact: a limit may end them earlier. There are none
    if the split cannot be read."""
    names = (source.split or "train").replace(" ", "").split("+")
    matches = [PART.fullmatch(part) for part in names]
    parts = [
        Rows(part["name"], _bound(part["first"], START), _bound(part["stop"], END))
        for part in matches
        if part is not None
    ]
    if len(parts) < len(names):
        return [], True
    if source.limit is None:
        return parts, True
    rows, limit = parts[0], source.limit
    if len(parts) > 1 or rows.first[0] != "rows" or (rows.stop[0] != "rows" and rows.stop != END):
        return parts, False
    last = rows.first[1] + limit
    last = min(last, rows.stop[1]) if rows.stop[0] == "rows" else last
    return [Rows(rows.split, rows.first, ("rows", last))], True


def _bound(text: str | None, default: Place) -> Place:
    if text is None:
        return default
    number = int(text.rstrip("%").replace("_", ""))
    if text.endswith("%"):
        return ("percent", number if number >= 0 else 100 + number)
    return ("rows" if number >= 0 else "rows from the end", number)


def _relation(left: Rows, other: Rows) -> str:
    """Return how many of the other's rows are in one: "all", "some", "none" or "unknown"."""
    if left.split != other.split:
        return "none"
    if not any(_before(a.stop, b.first) is not False for a, b in ((left, other), (other, left))):
        inside = _before(left.first, other.first) and _before(other.stop, left.stop)
        return "all" if inside else "some"
    return "none" if _before(left.stop, other.first) or _before(other.stop, left.first) else "unknown"


def _before(left: Place, other: Place) -> bool | None:
    """Return whether a place is at or before another one, None if that depends on the number of rows."""
    first, second = ([*_same(place)] for place in (left, other))
    for kind, number in first:
        for other_kind, other_number in second:
            if kind == other_kind:
                return number <= other_number
    if START in first or END in second:
        return True
    return False if END in first or START in second else None


def _same(place: Place) -> Iterator[Place]:
    """Yield the ways to write a place."""
    yield place
    if place in (START, ("percent", 0)):
        yield from (START, ("percent", 0))
    if place in (END, ("percent", 100)):
        yield from (END, ("percent", 100))
