"""Validate a plain mapping: return a Recipe, or diagnostics in our own words."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from recipec.spec import key_paths, versions, words
from recipec.spec.codes import Code
from recipec.spec.core_schema import flow, scalar
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.key_paths import Part
from recipec.spec.language import Recipe, Section
from recipec.spec.language.section import E0101, E0103, E0104, E0105, E0106, E0107, E0109, FAULT
from recipec.spec.structure import choices_of, field_at, paths_of_keys, section_at, sections


@dataclass(frozen=True)
class Validation:
    """The result of validating a mapping.

    Attributes:
        recipe: None if there are diagnostics.
        diagnostics: without positions.
        tentative: if there are diagnostics: the recipe without the faulty values, as far as the rest can be
            understood without them; else None.
        doubtful: the paths whose values in the tentative recipe are assumed.
    """

    recipe: Recipe | None
    diagnostics: list[Diagnostic]
    tentative: Recipe | None = None
    doubtful: frozenset[str] = frozenset()


def validate(raw: dict[str, Any]) -> Validation:
    """Build the Recipe, or report everything that is wrong with the mapping."""
    recipe, diagnostics = _attempt(raw)
    if not diagnostics:
        return Validation(recipe, [])
    rest, doubtful = _without_faults(raw, diagnostics)
    tentative, more = _attempt(rest) if rest is not None else (None, [])
    return Validation(None, diagnostics, None if more else tentative, frozenset(doubtful))


def _attempt(raw: dict[str, Any]) -> tuple[Recipe | None, list[Diagnostic]]:
    """Return the recipe, and the diagnostics."""
    recipe = None
    diagnostics: list[Diagnostic] = []
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as errors:
        for error in errors.errors(include_url=False):
            if error["type"] == "default_factory_not_called":
                continue
            diagnostics.append(_diagnostic(dict(error)))
    for where, section, values in sections(Recipe, raw, ()):
        for problem in section.crosscheck(values):
            path = key_paths.join((*where, *problem.key))
            diagnostics.append(
                Diagnostic(problem.code, problem.message, path, problem.help, at_key=problem.at_key)
            )
    return recipe, diagnostics


def _without_faults(
    raw: dict[str, Any], diagnostics: list[Diagnostic]
) -> tuple[dict[str, Any] | None, set[str]]:
    """Return a copy without the faulty keys, so that defaults apply, and the paths of those keys.

    A misspelled key is read as the key it resembles. The copy is None if a fault leaves the model or the
    machine unknown.
    """
    rest = copy.deepcopy(raw)
    doubtful: set[str] = set()
    for diagnostic in diagnostics:
        where = key_paths.split(diagnostic.path)
        if not where or (where[0] in ("model", "mesh") and diagnostic.code not in (E0101, E0107)):
            return None, set()
        index = next((i for i, part in enumerate(where) if isinstance(part, int)), None)
        if index is not None and diagnostic.code != E0101:
            where = where[:index]
        doubtful.add(key_paths.join(where))
        parent: Any = rest
        for part in where[:-1]:
            known = part < len(parent) if isinstance(part, int) else part in parent
            parent = parent[part] if known else {}
        if not isinstance(parent, dict) or where[-1] not in parent:
            continue
        value = parent.pop(where[-1])
        meant = _meant(str(where[-1]), where[:-1]) if diagnostic.code == E0101 else None
        if meant is not None and meant not in parent:
            parent[meant] = value
    if "recipe" in doubtful:
        rest["recipe"] = versions.VERSION
    if "name" in doubtful:
        rest["name"] = "unnamed"
    return rest, doubtful


E0102 = Code(
    "E0102",
    "missing key",
    cause="A required key is missing: `recipe`, `name`, `model.id`, `mesh`, `data.train`, or one of "
    "the few required keys of list items.",
    cure="Add it.",
)


def _diagnostic(error: dict[str, Any]) -> Diagnostic:
    """Convert one of pydantic's errors to a diagnostic."""
    where: tuple[Part, ...] = tuple(error["loc"])
    kind, value, context = error["type"], error["input"], error.get("ctx", {})
    path = key_paths.join(where)
    info = field_at(where)
    if kind == FAULT:
        message, help = context["message"], context["help"]
        return Diagnostic(context["code"], message, path + context["at"], help)
    if kind == "extra_forbidden":
        message, help = _unknown(where, value)
        return Diagnostic(E0101, message, path, help, at_key=True)
    if kind == "missing":
        parent = f"`{key_paths.join(where[:-1])}`" if len(where) > 1 else "the recipe"
        example = flow(info.examples[0]) if info and info.examples else "..."
        if where == ("mesh", "axes") and (axes := default_axes(value.get("accelerator"))):
            example = flow(axes)
        return Diagnostic(E0102, f"{parent} lacks the key `{where[-1]}`", path, f"{where[-1]}: {example}")
    if kind in ("string_too_short", "too_short"):
        return Diagnostic(E0109, f"`{path}` is empty", path, _example(where, info))
    if kind == "literal_error":
        return _choice(where, path, value, info)
    if kind in _BOUNDS:
        sign, key = _BOUNDS[kind]
        message = f"`{path}` must be {sign} {_bound(context[key])}, not {flow(value)}"
        return Diagnostic(E0105, message, path, _example(where, info))
    if kind == "finite_number":
        return Diagnostic(
            E0105, f"`{path}` must be a finite number, not {flow(value)}", path, _example(where, info)
        )
    if kind == "string_pattern_mismatch" and where[-1] == "[key]":  # pydantic's place of a mapping's key
        of = where[:-2]
        message = f"{shown(value)} cannot be a key of `{key_paths.join(of)}`"
        return Diagnostic(E0106, message, key_paths.join(where[:-1]), _example(of, field_at(of)), at_key=True)
    if kind == "string_pattern_mismatch":
        extra = info.json_schema_extra if info else None
        form = extra.get("x-form") if isinstance(extra, dict) else None
        message = (
            f"`{path}` must be {form}, not {shown(value)}" if form else f"`{path}` cannot be {shown(value)}"
        )
        return Diagnostic(E0106, message, path, _example(where, info))
    nullable = info is not None and isinstance(where[-1], str) and choices_of(info.annotation)[1]
    foreign = words.value(_named(where), value) if isinstance(value, str | int | float) else None
    wanted = _WANTED.get(kind, "of another kind") + (" or null" if nullable else "")
    if nullable and str(value).lower() in _NULL_WORDS:
        return Diagnostic(E0103, f"`{path}` must be {wanted}, not {sort(value)}", path, _null(where))
    help = foreign or _type_help(kind, where, value, info)
    return Diagnostic(E0103, f"`{path}` must be {wanted}, not {sort(value)}", path, help)


def _named(where: tuple[Part, ...]) -> str:
    """Return a path without indices, as in spec.words: "data.train.type"."""
    return ".".join(part for part in where if isinstance(part, str))


_NULL_WORDS = {"none", "nil", "false", "no", "off", ""}
"""Words that other languages use for null."""


def _null(where: tuple[Part, ...]) -> str:
    return f"`{_key(where, 'null')}`"


def _bound(number: float) -> str:
    return str(int(number)) if float(number).is_integer() else flow(number)


_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def sort(value: Any) -> str:
    """Return the kind of a value, in words."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {flow(value)}"
    if isinstance(value, str):
        return f"the text {shown(value)}"
    return "a list" if isinstance(value, list) else "a mapping"


def shown(value: Any) -> str:
    """Write a value as in a recipe, in backticks, shortened if it is long."""
    text = value if isinstance(value, str) and value else flow(value)
    text = " ".join(text.split()) or text
    return f"`{text if len(text) <= 60 else text[:57] + '...'}`"


def _key(where: tuple[Part, ...], value: str) -> str:
    return f"{where[-1]}: {value}" if isinstance(where[-1], str) else value


def _default(info: FieldInfo | None) -> Any:
    if info is None:
        return None
    if info.default_factory is not None and not info.default_factory_takes_validated_data:
        return info.default_factory()  # type: ignore[call-arg]
    return None if info.is_required() or info.default_factory is not None else info.default


def _example(where: tuple[Part, ...], info: FieldInfo | None) -> str:
    """Return a line to paste: the field's default or example; for an item of a list or mapping, the whole."""
    while info is None or isinstance(where[-1], int):
        where = where[:-1]
        info = field_at(where)
    value = _default(info)
    if value in (None, [], {}) or isinstance(value, Section):
        value = (info.examples or [None])[0]
    return f"for example `{_key(where, flow(value))}`"


def _type_help(kind: str, where: tuple[Part, ...], value: Any, info: FieldInfo | None) -> str:
    if kind in ("int_type", "float_type", "int_from_float") and isinstance(value, str):
        number = _number_in(value)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return f"without quotes: `{_key(where, flow(number))}`"
    if kind in ("int_type", "int_from_float") and isinstance(value, float) and value.is_integer():
        return f"`{_key(where, str(int(value)))}`"
    if kind == "bool_type":
        word = str(value).strip().lower()
        if word in ("yes", "on", "y", "1", "1.0", "true", "enabled"):
            return f"`{_key(where, 'true')}`"
        if word in ("no", "off", "n", "0", "0.0", "false", "none", "disabled"):
            return f"`{_key(where, 'false')}`"
    if kind == "string_type" and isinstance(value, int | float):
        text = str(value).lower() if isinstance(value, bool) else flow(value)
        if _fits(where, text):
            return f"put quotes around it: `{_key(where, json.dumps(text))}`"
    if kind == "list_type" and isinstance(value, str | int | float):
        return f"`{_key(where, '[' + flow(value) + ']')}`"
    if kind.startswith("model") and info is not None:
        section = section_at(where)
        if section is not None and value is None:
            return "give it keys, or remove it"
        for whole in _wrapped(key_paths.join(where), value):
            if isinstance(whole, dict) and _fits(where, whole):
                return f"`{_key(where, flow(whole))}`"
        if section is not None:
            return f"its keys are {', '.join(section.model_fields)}"
    return _example(where, info)


def _number_in(text: str) -> Any:
    """Return the value of a text after removing the digit separators of other languages."""
    text = text.strip()
    if re.fullmatch(r"[-+]?\d{1,3}([,_]\d{3})+", text) or re.fullmatch(r"[-+\d_]+", text):
        text = text.replace(",", "").replace("_", "")
    elif re.fullmatch(r"[-+]?\d+,\d+", text):
        text = text.replace(",", ".")
    return scalar(text)


def _choice(where: tuple[Part, ...], path: str, value: Any, info: FieldInfo | None) -> Diagnostic:
    choices, nullable = choices_of(info.annotation if info else None)
    allowed = [*choices, *(["null"] if nullable else [])]
    listed = allowed[0] if len(allowed) == 1 else f"{', '.join(allowed[:-1])} or {allowed[-1]}"
    message = f"`{path}` must be {listed}, not {shown(value)}"
    near = words.slip(str(value).lower(), choices)
    if nullable and str(value).lower() in _NULL_WORDS:
        help = _null(where)
    elif foreign := words.value(_named(where), value):
        help = foreign
    elif near:
        help = f"did you mean `{near}`?"
    else:
        help = _example(where, info)
    return Diagnostic(E0104, message, path, help)


def _unknown(where: tuple[Part, ...], value: Any) -> tuple[str, str]:
    """Return message and help for an unknown key with its value."""
    name, above = str(where[-1]), where[:-1]
    section = section_at(above)
    message = f"unknown key {shown(name)}{f' in `{key_paths.join(above)}`' if above else ''}"
    if meant := _meant(name, above):
        return message, f"did you mean `{meant}`?"
    lowered = name.lower().replace("-", "_")
    if foreign := words.key(lowered, _named(above)):
        return message, foreign if " " in foreign else f"here it is `{_nested(foreign, value)}`"
    elsewhere = paths_of_keys().get(lowered, [])
    if len(elsewhere) == 1:
        owner = f"`{_owner(elsewhere[0])}`" if _owner(elsewhere[0]) else "the recipe, not to a section"
        return message, f"`{lowered}` belongs to {owner}: `{_nested(elsewhere[0], value)}`"
    if elsewhere:
        owners = [f"`{_owner(path) or 'the recipe'}`" for path in elsewhere]
        return message, f"`{lowered}` belongs to {', '.join(owners[:-1])} or {owners[-1]}"
    return message, f"its keys are {', '.join(section.model_fields if section else ())}"


def _owner(path: str) -> str:
    return path.rpartition(".")[0]


def _nested(path: str, value: Any) -> str:
    """Write a key and the sections that contain it on one line: "train: {optimizer: {eps: 1.0e-6}}".

    A value that is invalid there is converted to a valid one if possible; otherwise the key's example is
    shown.
    """
    where = tuple(path.split("."))
    fitting = (candidate for candidate in _wrapped(path, value) if _fits(where, candidate))
    info = field_at(where)
    nested = next(fitting, info.examples[0] if info and info.examples else 1)
    first, *rest = where
    for name in reversed(rest):
        nested = {name: nested}
    return f"{first}: {flow(nested)}"


_BARE = {
    "model": "id",
    "mesh": "accelerator",
    "data": "train",
    "train": "objective",
    "train.optimizer": "name",
    "train.schedule": "name",
    "lora": "rank",
    "remat": "policy",
    "checkpoint": "directory",
    "checkpoint.local": "directory",
    "cache": "directory",
    "merge": "output",
    "serve": "accelerator",
}
"""The key of a section that a single value in the section's place is meant for."""


def _wrapped(path: str, value: Any) -> Iterator[Any]:
    """Yield a value, and what it may have been meant as: an integer, a list, a section's one key."""
    yield value
    if isinstance(value, float) and value.is_integer():
        yield int(value)
    if isinstance(value, str):
        yield _number_in(value)
    if isinstance(value, str | int | float):
        yield [value]
    if path in _BARE and not isinstance(value, dict):
        more = {"axes": default_axes(value)} if path == "mesh" else {}
        for inner in _wrapped(f"{path}.{_BARE[path]}", value):
            yield {_BARE[path]: inner, **more}


def _fits(where: tuple[Part, ...], value: Any) -> bool:
    """Return whether a value is valid at a path, regardless of its neighbors."""
    nested = value
    for name in reversed(where):
        nested = [nested] if isinstance(name, int) else {name: nested}
    try:
        Recipe.model_validate(nested)
    except ValidationError as errors:
        return not any(error["loc"][: len(where)] == where for error in errors.errors(include_url=False))
    return True


def default_axes(accelerator: Any) -> dict[str, int] | None:
    """Put all devices of a machine along fsdp, by its name; N of v4-N and v5p-N counts two per device."""
    match = re.fullmatch(r"([a-z0-9]+)-([1-9]\d{0,4})", str(accelerator).lower())
    return {"fsdp": max(1, int(match[2]) // (2 if match[1] in ("v4", "v5p") else 1))} if match else None


def _meant(name: str, place: tuple[Part, ...]) -> str | None:
    """Return the key of a section that a misspelled key, or a key of another tool, most likely means."""
    section = section_at(place)
    known = list(section.model_fields) if section else []
    lowered = name.lower().replace("-", "_")
    foreign = words.key(lowered, _named(place)) or ""
    if lowered in known:
        return lowered
    if foreign or lowered in paths_of_keys():
        here, _, key = foreign.rpartition(".")
        return key if here == _named(place) and key in known else None
    return words.slip(lowered, known)
