"""What the rows of a tool's data sets are to a recipe: one form for all of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from recipec.compiler.port.keys import Keys
from recipec.compiler.port.meaning import conversion


@dataclass(frozen=True)
class Rows:
    """The rows of one data set.

    Attributes:
        format: of `data.format`.
        fields: of `data.fields`.
        transform: the file of `data.transform`, "" for none.
        note: why, or how they differ.
    """

    format: str
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    note: str = ""


CHAT = Rows("chat")


def pairs(asked: str, answered: str, system: str | None = None) -> Rows:
    """Rows of two columns, a question and its answer.

    Args:
        system: a system message for all rows.
    """
    return Rows("chat", transform=conversion.paired(asked, answered, system))


def say(keys: Keys, key: str, found: Sequence[Rows], names: Sequence[str] = ()) -> Rows | None:
    """Sets the form of all rows; an error where they have several, None then and where there are none.

    Args:
        key: that names the data sets.
        names: of the data sets, for the message.
    """
    ways = {(rows.format, *sorted(rows.fields.items()), rows.transform): rows for rows in found}
    if len(ways) > 1:
        message = "the data sets' rows are of different forms, and a recipe has one form"
        way = "keep those of one form" + (f", as {names[0]} has" if names else "")
        keys.refuse(key, "E1142", message, way)
    if len(ways) != 1:
        return None
    (rows,) = ways.values()
    keys.ledger.set("data.format", rows.format, rows.note)
    if rows.fields:
        keys.ledger.set("data.fields", dict(rows.fields))
    if rows.transform:
        keys.ledger.files[conversion.FILE] = rows.transform
        keys.ledger.set("data.transform", conversion.TRANSFORM, f"{keys.tool}'s own way of reading the rows")
    return rows
