"""Maps of hyperparameters, as SageMaker and Vertex hand them to a script: every value is a text.

The script's parser makes numbers and switches of them: HfArgumentParser, by the types of TrainingArguments
and of TRL's arguments. SageMaker writes each value as JSON once more.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from recipec.compiler.port.keys import FALSE, TRUE, as_number, keys_of
from recipec.compiler.port.source import Source

LEAST = 2
"""Keys of those arguments that a map must have, to be taken for one of them."""
ABOVE = ("hyperparameters", "HyperParameters", "hyper_parameters")
"""What the map stands below in a description of a job."""


def typed(source: Source) -> Source:
    """A file with the map's keys at its top, and values as the script reads them; any other file as it is."""
    found, others = source.data, {}
    above = next((key for key in ABOVE if isinstance(found, dict) and isinstance(found.get(key), dict)), "")
    if above:
        others = {key: value for key, value in found.items() if key != above}
        found = found[above]
    if not isinstance(found, dict) or not found or not all(isinstance(each, str) for each in found.values()):
        return source
    types = _types()
    data = {key: _bare(value) for key, value in found.items()}
    if sum(str(key) in types for key in data) < LEAST:
        return source
    start = f"{above}." if above else ""

    def lifted(places: Mapping[str, Any]) -> dict[str, Any]:
        return {key.removeprefix(start): each for key, each in places.items()}

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
    """A text without the JSON that SageMaker writes around it."""
    try:
        inner = json.loads(value) if value.startswith('"') else value
    except ValueError:
        return value
    return inner if isinstance(inner, str) else value


def _read(value: str, kind: str) -> Any:
    """What a parser makes of a text, by the type of its argument; the text where that is none of them."""
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
