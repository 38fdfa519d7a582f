"""Check values of a row, and say what makes a row unusable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SHOWN = 120
"""The most characters of a reason."""


class Malformed(ValueError):
    """The reason why a row cannot be trained on."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason if len(reason) <= SHOWN else reason[: SHOWN - 3] + "...")


def kind(value: Any) -> str:
    """Return a value's JSON type with its article; Python's type name if JSON has no such type."""
    if value is None:
        return "a null"
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def text_of(value: Any, what: str) -> str:
    """Return the value if it is text that can be encoded as UTF-8.

    Args:
        what: names the value in the reason, as in "'prompt'".

    Raises:
        Malformed: it is not such a text.
    """
    if not isinstance(value, str):
        raise Malformed(f"{what} is {kind(value)}, not a string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise Malformed(f"{what} holds half a surrogate pair") from error
    return value


def parsed(value: Any, what: str) -> Any:
    """Return the value; text is parsed as JSON, as CSV and some Parquet files hold lists and objects.

    Raises:
        Malformed: it is text but not JSON.
    """
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        reason = f"{error.msg}, character {error.pos + 1}"
        raise Malformed(f"{what} is a string that is not JSON ({reason})") from error
    except (ValueError, RecursionError) as error:  # ValueError: a number of more than 4,300 digits
        raise Malformed(f"{what} is a string that is not JSON that can be read") from error


def checked(value: Any, what: str) -> Any:
    """Return the value if every text in it can be encoded as UTF-8.

    Raises:
        Malformed: one cannot.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            text_of(key, f"a key in {what}")
            checked(item, what)
    elif isinstance(value, list):
        for item in value:
            checked(item, what)
    elif isinstance(value, str):
        text_of(value, what)
    return value


def filled(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return an object without its keys whose value is null; nulls inside of its values stay.

    For the parts of a conversation, OpenAI's libraries write null where a key has no value. Chat templates
    ask whether the key exists.

    Raises:
        Malformed: text in it cannot be encoded as UTF-8.
    """
    return {key: item for key, item in checked(value, what).items() if item is not None}


class JsonObject(dict[str, Any]):
    """An object that a source holds as JSON text, so its nulls are values.

    Attributes:
        text: the JSON text; "" if it was part of a larger one.
    """

    text = ""


def json_objects(value: Any) -> Any:
    """Return parsed JSON with a JsonObject in place of each object."""
    if isinstance(value, dict):
        return JsonObject({key: json_objects(item) for key, item in value.items()})
    return [json_objects(item) for item in value] if isinstance(value, list) else value


class ColumnRow(dict[str, Any]):
    """A row of a column format, whose objects have every key of their column.

    A null stands for a key that only objects of other rows have, or for a null of the data: Arrow does not
    distinguish them.
    """


def without_fillers(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row of a column format without the null keys of the objects in its columns."""

    def cleaned(value: Any) -> Any:
        if isinstance(value, JsonObject):
            return value
        if isinstance(value, dict):
            return {key: cleaned(item) for key, item in value.items() if item is not None}
        return [cleaned(item) for item in value] if isinstance(value, list) else value

    return {name: cleaned(value) for name, value in row.items()}


def json_object(content: bytes) -> dict[str, Any]:
    """Parse a row that is written as JSON.

    Raises:
        Malformed: it is not UTF-8, not JSON, or not an object.
    """
    try:
        # json.loads itself would accept UTF-16 and lone surrogates.
        row = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON ({error.msg}, column {error.colno})") from error
    except (RecursionError, ValueError) as error:  # ValueError: a number of more than 4,300 digits
        raise Malformed("not JSON that can be read: nested too deep, or a number too long") from error
    if not isinstance(row, dict):
        raise Malformed(f"{kind(row)}, not an object")
    return row
