"""The building blocks of the language's sections."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticUndefined


@dataclass(frozen=True)
class Problem:
    """A violation of a rule that spans several keys of one section.

    Attributes:
        code: of spec.codes.
        key: path below the section, e.g. ("axes", "dp"); () for the section itself.
        at_key: whether the key is wrong (an unknown one), rather than its value.
    """

    code: str
    key: tuple[str, ...]
    message: str
    help: str | None = None
    at_key: bool = False


class Section(BaseModel):
    """A mapping of the recipe: strict, immutable, and without room for unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @classmethod
    def crosscheck(cls, given: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield violations of rules across keys. spec.load calls it whether or not each key is valid.

        Args:
            given: the section as written in the file; any value may be of any type.
        """
        yield from ()


LARGEST = 10**9
"""The upper bound of every count (an integer from 1 up) without another bound; it fits in 32 bits."""


def field(
    meaning: str,
    default: Any = PydanticUndefined,
    *,
    unit: str = "",
    form: str = "",
    default_is: str | None = None,
    example: Any = None,
    choices: Mapping[str, str] | None = None,
    **settings: Any,
) -> Any:
    """Declare a key of a section; without a default it is required.

    Args:
        meaning: what it sets, in one or two sentences.
        default: plain value; lists and mappings are copied for each recipe.
        unit: what a number counts; "" for names, texts, choices and switches.
        form: a description of the texts that match `pattern`.
        default_is: the default in words, if it is not the value itself.
        example: a value for the schema and for the help on a missing key; None for the default.
        choices: the meaning of each word, for a key that takes one of several.
        settings: bounds and others, as for pydantic's Field.
    """
    if default_is is None and default is not PydanticUndefined:
        default_is = json.dumps(default)
    if settings.get("ge") == 1:
        settings.setdefault("le", LARGEST)
    parts = [meaning]
    if unit:
        parts.append(f"Unit: {unit}.")
    parts.append("Required." if default_is is None else f"Default: {default_is}.")
    settings["description"] = " ".join(parts)
    shown = default if example is None and default is not PydanticUndefined else example
    if shown is not None:
        settings["examples"] = [shown]
    extra = {
        "x-unit": unit,
        "x-form": form,
        "x-choices": dict(choices or {}) or None,
        "default": default if isinstance(default, list | dict) else None,
    }
    settings["json_schema_extra"] = {key: value for key, value in extra.items() if value not in ("", None)}
    if isinstance(default, list | dict):
        return Field(default_factory=lambda: json.loads(json.dumps(default)), **settings)
    if "default_factory" in settings:
        return Field(**settings)
    return Field(default, **settings)


def section(meaning: str, kind: type[Section], example: Mapping[str, Any]) -> Any:
    """Declare a key that holds a section; all keys of the section have defaults."""
    description = f"{meaning} Default: the default of each key."
    return Field(default_factory=kind, description=description, examples=[example])


def fault(code: str, message: str, help: str | None = None, at: str = "") -> PydanticCustomError:
    """Return the error that a validator raises to report its own diagnostic.

    Args:
        at: path below the validated value.
    """
    return PydanticCustomError(code, "{message}", {"message": message, "help": help, "at": at})


def first_repeated(items: Sequence[Any]) -> int | None:
    """Return the index of the first item that occurred before, or None. All items are hashable."""
    seen = set()
    for index, item in enumerate(items):
        if item in seen:
            return index
        seen.add(item)
    return None


def distinct(items: list[Any]) -> list[Any]:
    """Validate that no item occurs twice."""
    index = first_repeated(items)
    if index is not None:
        raise fault("E0111", f"`{items[index]}` is given twice", "remove one of the two", at=f"[{index}]")
    return items
