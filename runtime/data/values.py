"""Check values of a row, and say what makes a row unusable."""

from __future__ import annotations

import json
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


def without_nulls(value: Any, what: str) -> Any:
    """Return a copy without the keys whose value is None, at every depth; list items stay.

    Column formats fill keys that only other objects have with nulls, which chat templates would print.

    Raises:
        Malformed: text in it cannot be written as UTF-8.
    """
    if isinstance(value, dict):
        kept = {key: without_nulls(item, what) for key, item in value.items() if item is not None}
        return {text_of(key, f"a key in {what}"): item for key, item in kept.items()}
    if isinstance(value, list):
        return [without_nulls(item, what) for item in value]
    return text_of(value, what) if isinstance(value, str) else value


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
