"""The pages of the language: a page for each section of a recipe, made from its JSON Schema."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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

SECTION = "a section of keys"
"""The type of a key that holds a section."""

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
            plain += _key(name, field, schema["$defs"], name, Written({}, []))
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
    written = Written({}, [{name: example} for example in field.get("examples", ())[:1]])
    item = "[]" if field.get("type") == "array" else ""
    keys = _keys(_mapping(target), sections, f"{name}{item}", "", written)
    return "\n".join([*lines, *keys]).rstrip("\n") + "\n"


@dataclass(frozen=True)
class Written:
    """What a page already has.

    Attributes:
        sections: the path at which the keys of a section were written, by the section's name.
        examples: parts of recipes.
    """

    sections: dict[str, str]
    examples: list[Any]

    def shows(self, path: str) -> bool:
        """Return whether an example has a key."""
        return any(_has(example, path.split(".")) for example in self.examples)


def _has(value: Any, path: list[str]) -> bool:
    if not path:
        return True
    name = path[0].removesuffix("[]")
    if not isinstance(value, dict) or name not in value:
        return False
    inner = value[name]
    if path[0].endswith("[]"):
        return any(_has(item, path[1:]) for item in inner if isinstance(inner, list))
    return _has(inner, path[1:])


def _keys(section: Schema, sections: Schema, path: str, above: str, written: Written) -> Iterator[str]:
    """Yield the keys of a section, and of the sections within it.

    Args:
        path: of the section in a recipe.
        above: the path below the page's section, with hyphens, for anchors: "" or "optimizer-".
        written: what the page has, which grows.
    """
    for name, field in section["properties"].items():
        anchor = f"{above}{name}"
        yield from _key(f"{path}.{name}", field, sections, anchor, written)
        inner = _target(field)
        if inner in written.sections:
            yield from (f"The keys of an entry are those of `{written.sections[inner]}`.", "")
        elif inner:
            item = "[]" if field.get("type") == "array" else ""
            written.sections[inner] = f"{path}.{name}{item}"
            yield from _keys(
                _mapping(sections[inner]), sections, f"{path}.{name}{item}", f"{anchor}-", written
            )


def _key(path: str, field: Schema, sections: Schema, anchor: str, written: Written) -> Iterator[str]:
    yield from (heading("##", f"`{path}`", anchor), "", _parted(field)[0], "")
    meanings = _meanings(field)
    example = next(
        (value for value in field.get("examples", ()) if json.dumps(value) != _parted(field)[2].strip("`")),
        None,
    )
    text = ""
    telling = not isinstance(example, bool | int | float | None)
    if telling and not meanings and not written.shows(path):
        nested = _within(path, example)
        written.examples.append(nested)
        text = to_yaml({path.rpartition(".")[2]: example}).rstrip("\n")
    facts = _facts(field, sections, path)
    if text and "\n" not in text and "`" not in text:
        facts = "; ".join(filter(None, [facts, f"for example `{text}`"]))
        text = ""
    if facts:
        yield from (facts, "")
    if len(meanings) > 1:
        yield from (f"- `{_value(value)}`: {meaning}" for value, meaning in meanings.items())
        yield ""
    if text:
        yield from ("```yaml", text, "```", "")


def _facts(field: Schema, sections: Schema, path: str) -> str:
    """Return type, unit and default, on one line."""
    _, required, default = _parted(field)
    facts = [_type(field, sections)] if path and not _listed(field) else []
    if default == "`null`":
        facts = [fact.removesuffix(" or `null`") for fact in facts]
    if facts == [SECTION]:
        facts = []
    unit = field.get("x-unit", "")
    if unit and not unit.startswith("none"):
        facts.append(f"**unit** {unit}")
    if field.get("x-form"):
        facts.append(f"**form** {field['x-form']}")
    stated = default and default != OF_EACH_KEY
    facts.append("**required**" if required else f"**default** {default}" if stated else "")
    text = "; ".join(fact for fact in facts if fact)
    return text if text.startswith("`") else re.sub("[a-z]", lambda letter: letter[0].upper(), text, count=1)


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
            kinds = [_type(choice, sections) for choice in field[together]]
            return " or ".join(dict.fromkeys(kinds))
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        kinds = [
            _type(section, sections)
            for section in sections[name].get("anyOf", ())
            if section.get("type") != "object"
        ]
        return " or ".join([*kinds, SECTION])
    if "const" in field:
        return f"`{_value(field['const'])}`"
    if "enum" in field:
        return " or ".join(f"`{_value(value)}`" for value in field["enum"])
    kind = field.get("type")
    if kind == "array":
        return f"list of: {_type(field.get('items', {}), sections)}"
    if kind == "object":
        values = field.get("additionalProperties")
        return f"mapping of names to: {_type(values, sections)}" if isinstance(values, dict) else "mapping"
    named = {"integer": "whole number", "number": "number", "string": "text", "boolean": "boolean"}
    return f"{named.get(str(kind), '`null`' if kind == 'null' else 'any value')}{_bounds(field)}"


def _bounds(field: Schema) -> str:
    low, high = field.get("minimum"), field.get("maximum")
    above, below = field.get("exclusiveMinimum"), field.get("exclusiveMaximum")
    if high is not None and high >= 10**9:
        high = None
    if low is not None and high is not None:
        return f" from {low:,} to {high:,}"
    limits = (("at least", low), ("more than", above), ("at most", high), ("less than", below))
    return "".join(f", {words} {limit:,}" for words, limit in limits if limit is not None)


def _listed(field: Schema) -> bool:
    """Return whether the table of choices has every value that a key takes."""
    choices = field.get("enum", [choice["const"] for choice in field.get("oneOf", ()) if "const" in choice])
    return bool(choices) and {*choices} == {*_meanings(field)}


def _meanings(field: Schema) -> dict[Any, str]:
    """Return the choices that have a description, with it."""
    out: dict[Any, str] = {}
    for part in [field, *field.get("anyOf", ()), *field.get("oneOf", ())]:
        if "const" in part and part.get("description"):
            out[part["const"]] = part["description"]
        for key in ("enumDescriptions", "markdownEnumDescriptions"):
            out |= dict(zip(part.get("enum", ()), part.get(key, ()), strict=False))
        if part is not field:
            out |= _meanings(part)
    return out


def _target(field: Schema) -> str:
    """Return the name of the section that a key holds (alone, in a list, or null); "" for other keys."""
    for part in [field, *field.get("anyOf", ()), field.get("items", {})]:
        if "$ref" in part:
            return str(part["$ref"]).rpartition("/")[2]
    return ""


def _mapping(section: Schema) -> Schema:
    """Return the mapping form of a section."""
    whole: Schema = next((form for form in section.get("anyOf", ()) if "properties" in form), section)
    return whole


def _within(path: str, example: Any) -> Any:
    """Nest an example at its place in a recipe."""
    nested = example
    for part in reversed(path.split(".")):
        nested = {part[:-2]: [nested]} if part.endswith("[]") else {part: nested}
    return nested


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
