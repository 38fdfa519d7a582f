"""The form of the rows of a tool's data sets in a recipe: one form for all, or one for each source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from recipec.port.engine import Says, Statements
from recipec.port.keys import Keys
from recipec.port.meaning import conversion
from recipec.port.refusals import E1142


class Form(Protocol):
    """The form of one data set's rows: `format`, `fields` and the text of a `transform`, "" for none.

    `note` says why the rows have this form, or how they differ.
    """

    @property
    def format(self) -> str: ...
    @property
    def fields(self) -> Mapping[str, str]: ...
    @property
    def transform(self) -> str: ...
    @property
    def note(self) -> str: ...


def alike(forms: Sequence[Form]) -> bool:
    """Return whether all rows have the same form."""
    return len({(form.format, *sorted(form.fields.items()), form.transform) for form in forms}) < 2


def with_own(source: Any, override: Mapping[str, Any]) -> Any:
    """Add keys to an entry of `data.train`."""
    if source is None or not override:
        return source
    return {**(source if isinstance(source, dict) else {"path": source}), **override}


def apart(keys: Keys, sources: Sequence[tuple[Any, Form]]) -> Statements[list[Any]]:
    """Return sources of several forms, each with the form of its rows. `data.format` is that of the first."""
    first, entries = sources[0][1].format, []
    files: dict[str, str] = {}
    for source, form in sources:
        override: dict[str, Any] = {} if form.format == first else {"format": form.format}
        if form.fields:
            override["fields"] = dict(form.fields)
        if form.transform:
            number = f"_{len(files) + 1}" if files else ""
            name = files.setdefault(form.transform, f"convert{number}.py")
            yield keys.file(name, form.transform)
            override["transform"] = f"{name}:{conversion.FUNCTION}"
        entries.append(with_own(source, override))
    for path in ("data.fields", "data.transform"):  # set for one data set before the others were read
        yield keys.moves(path, "data.train")
    yield keys.sets("data.format", first)
    return entries


@dataclass(frozen=True)
class Rows:
    """The rows of one data set.

    Attributes:
        format: the recipe's `data.format`.
        fields: the recipe's `data.fields`.
        transform: the text of the file of `data.transform`, "" for none.
        note: the reason for the form, or how the rows differ.
    """

    format: str
    fields: Mapping[str, str] = field(default_factory=dict)
    transform: str = ""
    note: str = ""


CHAT = Rows("chat")


def pairs(asked: str, answered: str, system: str | None = None) -> Rows:
    """Return the form of rows with two columns, a question and its answer."""
    return Rows("chat", transform=conversion.paired(asked, answered, system))


def say(keys: Keys, key: str, forms: Sequence[Rows], names: Sequence[str] = ()) -> Statements[Rows | None]:
    """Set the form of all rows. It is an error if the data sets have several forms.

    Args:
        key: the key that names the data sets.
        names: the data sets' names, for the message.

    Returns:
        The form, or None after an error or without any data set.
    """
    ways = {(rows.format, *sorted(rows.fields.items()), rows.transform): rows for rows in forms}
    if len(ways) > 1:
        message = "the data sets have rows of different forms, which recipec does not mix in one run"
        way = "keep only data sets of one form" + (f", as {names[0]} has" if names else "")
        yield keys.refuse(key, E1142, message, way)
    if len(ways) != 1:
        return None
    (rows,) = ways.values()
    yield from say_form(keys, rows, f"{keys.tool} reads the rows in its own way")
    return rows


def say_form(keys: Keys, form: Form, why: str) -> Says:
    """Set the form of all rows.

    Args:
        why: why a transform converts them.
    """
    yield keys.sets("data.format", form.format, form.note)
    if form.fields:
        yield keys.sets("data.fields", dict(form.fields))
    if form.transform:
        yield keys.file(conversion.FILE, form.transform)
        yield keys.sets("data.transform", conversion.TRANSFORM, why)


def say_sources(keys: Keys, sources: Sequence[Any], count: int) -> Says:
    """Set the sources of training, the first `count` ones, and those of the evaluation, without None."""
    for path, part in (("data.train", sources[:count]), ("data.eval", sources[count:])):
        if readable := [source for source in part if source is not None]:
            yield keys.sets(path, readable)
