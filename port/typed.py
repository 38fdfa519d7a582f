"""Maps of hyperparameters, as SageMaker and Vertex pass them to a script: every value is a text.

The script's parser turns the texts into numbers and switches. It is HfArgumentParser, which uses the types of
TrainingArguments and of TRL's arguments. SageMaker also encodes each value as JSON.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipec.port.keys import FALSE, TRUE, as_number, keys_of
from recipec.port.source import Source

LEAST = 2
"""The number of keys of those arguments that a mapping must have to count as such a map."""
ABOVE = ("hyperparameters", "HyperParameters", "hyper_parameters")
"""The keys under which a job description holds the map."""


def typed(source: Source) -> Source:
    """Move the map's keys to the file's top, with the values that the script reads. Keep other files."""
    values, others = source.data, {}
    above = next((key for key in ABOVE if isinstance(values, dict) and isinstance(values.get(key), dict)), "")
    if above:
        others = {key: value for key, value in values.items() if key != above}
        values = values[above]
    if (
        not isinstance(values, dict)
        or not values
        or not all(isinstance(value, str) for value in values.values())
    ):
        return source
    types = _types()
    data = {key: _bare(value) for key, value in values.items()}
    if sum(str(key) in types for key in data) < LEAST:
        return source
    start = f"{above}." if above else ""

    def lifted(places: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(start): place for key, place in places.items()}

    data = others | {key: _read(value, types.get(str(key), "str")) for key, value in data.items()}
    return replace(
        source,
        data=data,
        spans=lifted(source.spans),
        keys=lifted(source.keys),
        secrets=lifted(source.secrets),
    )


@functools.cache
def _types() -> Mapping[str, str]:
    sections = ("sft", "dpo", "orpo", "cpo", "script", "model", "mixture")
    keys = {**keys_of("trl", *sections), **keys_of("trainer", "training_arguments")}
    return {key: str(entry[0]) for key, entry in keys.items()}


def _bare(value: str) -> str:
    """Decode a text from the JSON that SageMaker writes around it."""
    try:
        inner = json.loads(value) if value.startswith('"') else value
    except ValueError:
        return value
    return inner if isinstance(inner, str) else value


def _read(value: str, kind: str) -> Any:
    """Parse a text by the type of its argument. Return the text itself if it does not have that type."""
    if "bool" in kind and value.lower() in (*TRUE, *FALSE):
        return value.lower() in TRUE
    if "int" in kind or "float" in kind:
        number = as_number(value)
        return (
            value if number is None else int(number) if number == int(number) and "." not in value else number
        )
    if ("list" in kind or "dict" in kind) and value[:1] in ("[", "{"):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value
