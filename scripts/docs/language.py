"""The pages of the language: a page for each section of a recipe, made from its JSON Schema."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from recipec.spec.recipe_text import to_yaml
from recipec.spec.schema import json_schema
from scripts.docs.made import Page, cell, heading

Schema = Mapping[str, Any]

TOTALS = re.compile(
    r"\s*(?:Unit: (?P<unit>[^.]*)\.\s*)?(?:(?P<required>Required)\.|Default: (?P<default>.*)\.)$", re.S
)
"""The end of a key's description, which gets its own line here."""

OF_EACH_KEY = "the default of each key"
"""The default of a section that says nothing about it."""

LIST = re.compile(r"(?<=<!-- sections, from the schema -->\n).*(?=<!-- end of sections -->)", re.S)
"""The place of the list of sections in docs/language.md."""


@functools.cache
def pages() -> tuple[Page, ...]:
    """Return a page for each section, in the language's order."""
    schema = json_schema()
    return tuple(
        Page(f"language/{name}.md", name, _section(name, field, schema["$defs"]))
        for name, field in schema["properties"].items()
        if _target(field)
    )


def completed(markdown: str) -> str:
    """Return docs/language.md with the list of sections, and of keys outside sections."""
    schema = json_schema()
    rows = ["| section | |", "|---|---|"]
    plain: list[str] = []
    for name, field in schema["properties"].items():
        meaning = _parted(field)[0]
        if _target(field):
            rows.append(f"| [`{name}`](language/{name}.md) | {cell(meaning)} |")
        else:
            plain += _key(name, field, schema["$defs"], name)
    text = "\n".join(["", *rows, "", *plain])
    return LIST.sub(lambda _: text, markdown)


def _section(name: str, field: Schema, sections: Schema) -> str:
    """Return the page of one section.

    Args:
        field: the recipe's key for it.
        sections: every section of the schema, by its name in the schema.
    """
    target = sections[_target(field)]
    meaning = _parted(field)[0]
    lines = [f"# {name}"]
    if not meaning.startswith(target["description"].rstrip(".")):
        lines += ["", target["description"]]
    lines += ["", meaning]
    if facts := _facts(field, sections, ""):
        lines += ["", facts]
    for example in field.get("examples", ())[:1]:
        lines += ["", "```yaml", to_yaml({name: example}).rstrip("\n"), "```"]
    lines += [""]
    item = "[]" if field.get("type") == "array" else ""
    return "\n".join([*lines, *_keys(_mapping(target), sections, f"{name}{item}", "")]).rstrip("\n") + "\n"


def _keys(section: Schema, sections: Schema, path: str, above: str) -> Iterator[str]:
    """Yield the keys of a section, and of the sections within it.

    Args:
        path: of the section in a recipe.
        above: the path below the page's section, with hyphens, for anchors: "" or "optimizer-".
    """
    for name, field in section["properties"].items():
        anchor = f"{above}{name}"
        yield from _key(f"{path}.{name}", field, sections, anchor)
        inner = _target(field)
        if inner:
            item = "[]" if field.get("type") == "array" else ""
            yield from _keys(_mapping(sections[inner]), sections, f"{path}.{name}{item}", f"{anchor}-")


def _key(path: str, field: Schema, sections: Schema, anchor: str) -> Iterator[str]:
    yield from (heading("##", f"`{path}`", anchor), "")
    yield from (_parted(field)[0], "", _facts(field, sections, path), "")
    meanings = _meanings(field)
    if meanings:
        yield from ("| value | |", "|---|---|")
        yield from (f"| `{_value(value)}` | {cell(meaning)} |" for value, meaning in meanings.items())
        yield ""
    example = next(
        (one for one in field.get("examples", ()) if json.dumps(one) != _parted(field)[2].strip("`")), None
    )
    if example is not None:
        yield from ("```yaml", to_yaml(_within(path, example)).rstrip("\n"), "```", "")


def _facts(field: Schema, sections: Schema, path: str) -> str:
    """Return type, unit and default, on one line."""
    _, required, default = _parted(field)
    facts = (
        [f"**Type** {'one of these values' if _listed(field) else _type(field, sections)}"] if path else []
    )
    unit = field.get("x-unit", "")
    if unit and not unit.startswith("none"):
        facts.append(f"**Unit** {unit}")
    if field.get("x-form"):
        facts.append(f"**Form** {field['x-form']}")
    stated = default and default != OF_EACH_KEY
    facts.append("**Required**" if required else f"**Default** {default}" if stated else "")
    return " · ".join(fact for fact in facts if fact)


def _parted(field: Schema) -> tuple[str, bool, str]:
    """Split a description into its meaning, whether the key is required, and the default (words or value)."""
    text: str = field.get("description", "")
    match = TOTALS.search(text)
    if match is None:
        return text, False, ""
    default = match["default"] or ""
    return text[: match.start()], bool(match["required"]), default if _in_words(default) else f"`{default}`"


def _in_words(default: str) -> bool:
    try:
        json.loads(default)
    except ValueError:
        return True
    return not default


def _type(field: Schema, sections: Schema) -> str:
    """Describe the type of a key's value."""
    for together in ("anyOf", "oneOf"):
        if together in field:
            kinds = [_type(one, sections) for one in field[together]]
            return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        kinds = [
            _type(one, sections) for one in sections[name].get("anyOf", ()) if one.get("type") != "object"
        ]
        return " or ".join([*kinds, "a section of keys"])
    if "const" in field:
        return f"`{_value(field['const'])}`"
    if "enum" in field:
        return " or ".join(f"`{_value(one)}`" for one in field["enum"])
    kind = field.get("type")
    if kind == "array":
        return f"list of: {_type(field.get('items', {}), sections)}"
    if kind == "object":
        values = field.get("additionalProperties")
        return f"mapping of names to: {_type(values, sections)}" if isinstance(values, dict) else "mapping"
    named = {"integer": "whole number", "number": "number", "string": "text", "boolean": "`true` or `false`"}
    return f"{named.get(str(kind), '`null`' if kind == 'null' else 'any value')}{_bounds(field)}"


def _bounds(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    said = []
    if low is not None:
        said.append(f"at least {low:,}")
    if above is not None:
        said.append(f"more than {above:,}")
    if high is not None and high < 10**9:
        said.append(f"at most {high:,}")
    if below is not None:
        said.append(f"less than {below:,}")
    return f", {', '.join(said)}" if said else ""


def _listed(field: Schema) -> bool:
    """Return whether the table of choices has every value that a key takes."""
    choices = field.get("enum", [one["const"] for one in field.get("oneOf", ()) if "const" in one])
    return bool(choices) and {*choices} == {*_meanings(field)}


def _meanings(field: Schema) -> dict[Any, str]:
    """Return the choices that have a description, with it."""
    out: dict[Any, str] = {}
    for one in [field, *field.get("anyOf", ()), *field.get("oneOf", ())]:
        if "const" in one and one.get("description"):
            out[one["const"]] = one["description"]
        for key in ("enumDescriptions", "markdownEnumDescriptions"):
            out |= dict(zip(one.get("enum", ()), one.get(key, ()), strict=False))
        if one is not field:
            out |= _meanings(one)
    return out


def _target(field: Schema) -> str:
    """Return the name of the section that a key holds (alone, in a list, or null); "" for other keys."""
    for one in [field, *field.get("anyOf", ()), field.get("items", {})]:
        if "$ref" in one:
            return str(one["$ref"]).rpartition("/")[2]
    return ""


def _mapping(section: Schema) -> Schema:
    """Return the mapping form of a section."""
    whole: Schema = next((one for one in section.get("anyOf", ()) if "properties" in one), section)
    return whole


def _within(path: str, example: Any) -> Any:
    """Nest an example at its place in a recipe."""
    nested = example
    for part in reversed(path.split(".")):
        nested = {part[:-2]: [nested]} if part.endswith("[]") else {part: nested}
    return nested


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
