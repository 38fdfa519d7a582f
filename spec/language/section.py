"""The building blocks of the language's sections."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import PydanticCustomError, PydanticUndefined

from recipec.spec.codes import Code

E0101 = Code(
    "E0101",
    "unknown key",
    cause="The section has no such key. Keys are never ignored.",
    cure="Use the key that the message suggests, or remove it. `recipe schema` lists all keys.",
)

E0103 = Code(
    "E0103",
    "wrong type",
    cause="The value has the wrong type: text instead of a number, or a list instead of a single value.",
    cure="Write the value as the message says. In YAML 1.2 only true and false are booleans, and "
    "quotes turn a number into text.",
)

E0104 = Code(
    "E0104",
    "not one of the choices",
    cause="The key accepts one of a few words, and the value is not one of them.",
    cure="Use one of the words that the message lists.",
)

E0105 = Code(
    "E0105",
    "out of range",
    cause="The number is outside the range of the key.",
    cure="Choose a number in the range that the message gives.",
)

E0106 = Code(
    "E0106",
    "malformed value",
    cause="The text does not have the form that the key requires.",
    cure="Follow the form that the message shows.",
)

E0107 = Code(
    "E0107",
    "keys exclude each other",
    cause="Two keys set the same thing in two ways, such as `epochs` and `steps`.",
    cure="Keep one of them. If the other comes from an extended file, set it to null in this one.",
)

E0109 = Code(
    "E0109",
    "empty value",
    cause="A list, a mapping or a text that must not be empty is empty.",
    cure="Add an item.",
)

E0110 = Code(
    "E0110",
    "one of several keys is needed",
    cause="One of two keys is required, and neither is given: `accelerator` or `topology`, `epochs` "
    "or `steps`.",
    cure="Give one of them.",
)


@dataclass(frozen=True)
class Problem:
    """A violation of a rule that spans several keys of one section.

    Attributes:
        key: path below the section, e.g. ("axes", "dp"); () for the section itself.
        at_key: whether the key is wrong (an unknown one), rather than its value.
    """

    code: Code
    key: tuple[str, ...]
    message: str
    help: str | None = None
    at_key: bool = False


class Section(BaseModel):
    """A mapping of the recipe: strict, immutable, and without room for unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    @classmethod
    def crosscheck(cls, values: Mapping[str, Any]) -> Iterator[Problem]:
        """Yield violations of rules across keys. spec.load calls it whether or not each key is valid.

        Args:
            values: the section as written in the file; any value may be of any type.
        """
        yield from ()

    @classmethod
    def after_compiling(cls) -> set[str]:
        """Return the keys on which a compiled step does not depend."""
        return {
            key
            for key, field in cls.model_fields.items()
            if isinstance(field.json_schema_extra, dict) and field.json_schema_extra.get(UNCOMPILED)
        }


UNCOMPILED = "x-uncompiled"
"""The mark of such a key in its `json_schema_extra`; the published schema has no such marks."""

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
    compiled: bool = True,
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
        compiled: whether a compiled step may depend on it. A plan is found again when other keys change.
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
        UNCOMPILED: None if compiled else True,
        "default": default if isinstance(default, list | dict) else None,
    }
    settings["json_schema_extra"] = {key: value for key, value in extra.items() if value not in ("", None)}
    if isinstance(default, list | dict):
        return Field(default_factory=lambda: json.loads(json.dumps(default)), **settings)
    if "default_factory" in settings:
        return Field(**settings)
    return Field(default, **settings)


def section(meaning: str, kind: type[Section], example: Mapping[str, Any], *, compiled: bool = True) -> Any:
    """Declare a key that holds a section; all keys of the section have defaults."""
    description = f"{meaning} Default: the default of each key."
    extra: dict[str, Any] | None = None if compiled else {UNCOMPILED: True}
    return Field(default_factory=kind, description=description, examples=[example], json_schema_extra=extra)


FAULT = "fault"
"""Pydantic's name for the errors of validators, whose context holds their diagnostic."""


def fault(code: Code, message: str, help: str | None = None, at: str = "") -> PydanticCustomError:
    """Return the error that a validator raises to report its own diagnostic.

    Args:
        at: path below the validated value.
    """
    return PydanticCustomError(FAULT, "{message}", {"code": code, "message": message, "help": help, "at": at})


def first_repeated(items: Sequence[Any]) -> int | None:
    """Return the index of the first item that occurred before, or None. All items are hashable."""
    seen = set()
    for index, item in enumerate(items):
        if item in seen:
            return index
        seen.add(item)
    return None


E0111 = Code(
    "E0111",
    "given twice in a list",
    cause="A list that must not repeat an item contains one twice.",
    cure="Remove one of the two.",
)


def distinct(items: list[Any]) -> list[Any]:
    """Validate that no item occurs twice."""
    index = first_repeated(items)
    if index is not None:
        raise fault(E0111, f"`{items[index]}` is given twice", "remove one of the two", at=f"[{index}]")
    return items
