"""Write the language as a JSON Schema, for editors: docs/recipe.schema.json.

    python -m recipec.spec.schema > docs/recipe.schema.json

`recipe check` covers rules across several keys, and everything that depends on the model or the machine.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from recipec.spec.language import Recipe
from recipec.spec.language.section import UNCOMPILED

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema() -> dict[str, Any]:
    """Return the schema, as a plain dict in a fixed order."""
    schema = Recipe.model_json_schema()
    sections = schema["$defs"]
    needed = {name: _section(schema["properties"][name], sections) for name in schema.pop("required")}
    complete = {
        "required": list(needed),
        "properties": {name: {"required": keys} for name, keys in needed.items() if keys},
    }
    for name in needed:
        reference = schema["properties"][name].get("$ref")
        if reference:
            sections[reference.rpartition("/")[2]].pop("required", None)
    for part in (schema, *sections.values()):
        _tidy(part)
        for branch in (part, *part.get("anyOf", [])):
            for field in branch.get("properties", {}).values():
                _describe_choices(field)
    return {
        "$schema": DIALECT,
        "title": "recipec recipe",
        "description": schema["description"],
        "type": "object",
        "properties": schema["properties"],
        "additionalProperties": False,
        "anyOf": [{"required": ["extends"]}, complete],
        "$defs": dict(sorted(sections.items())),
    }


def _section(field: dict[str, Any], sections: dict[str, Any]) -> list[str]:
    """Return the required keys of a section."""
    name = field.get("$ref", "").rpartition("/")[2]
    return list(sections[name].get("required", [])) if name else []


def _tidy(section: dict[str, Any]) -> None:
    """Remove the titles that pydantic derives from names."""
    for part in (section, *section.get("anyOf", [])):
        part.pop("title", None)
        for field in part.get("properties", {}).values():
            field.pop("title", None)


def _describe_choices(field: dict[str, Any]) -> None:
    """Add the meaning of each choice, in the form that editors read."""
    field.pop(UNCOMPILED, None)
    meanings = field.pop("x-choices", None)
    if meanings is None:
        return
    items = field.get("items", {})
    for place in (field, *field.get("anyOf", []), items, *items.get("anyOf", [])):
        if place.get("enum"):
            place["enumDescriptions"] = [meanings[str(word)] for word in place["enum"]]
        elif "const" in place:
            place["description"] = meanings[place["const"]]


def modeline(target: str) -> str:
    """Return the first line of a recipe, by which editors find its schema.

    Args:
        target: the schema's path from the recipe's folder, with slashes, or its address.
    """
    return f"# yaml-language-server: $schema={target}"


@functools.cache
def text() -> str:
    """Return the text of docs/recipe.schema.json."""
    return json.dumps(json_schema(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


if __name__ == "__main__":
    print(text(), end="")
