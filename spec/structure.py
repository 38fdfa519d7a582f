"""Query the language as a tree: the section and field at a path, a field's choices, paths of each key."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union

from pydantic.fields import FieldInfo

from recipec.spec.key_paths import Part
from recipec.spec.language import Recipe, Section


def sections(
    kind: type[Section], values: Any, where: tuple[Part, ...]
) -> Iterator[tuple[tuple[Part, ...], type[Section], Mapping[str, Any]]]:
    """Yield every section of the language that the raw mapping contains, with its path."""
    if not isinstance(values, dict):
        return
    yield where, kind, values
    for name, info in kind.model_fields.items():
        inner, is_list = section_of(info.annotation)
        value = values.get(name)
        if inner is None:
            continue
        if not is_list:
            yield from sections(inner, value, (*where, name))
        elif isinstance(value, list):
            for index, item in enumerate(value):
                yield from sections(inner, item, (*where, name, index))


def section_of(annotation: Any) -> tuple[type[Section] | None, bool]:
    """Return the Section that an annotation holds, and whether it is in a list."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation, False
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return section_of(arguments[0])
    if origin is list:
        return section_of(arguments[0])[0], True
    if origin in (Union, types.UnionType):
        sections = [pair for pair in map(section_of, arguments) if pair[0]]
        return sections[0] if sections else (None, False)
    return None, False


def section_at(parts: tuple[Part, ...]) -> type[Section] | None:
    """Return the language's section at a path, or None if the path does not lead to one."""
    kind: type[Section] | None = Recipe
    for part in parts:
        if isinstance(part, int):
            continue
        info = kind.model_fields.get(part) if kind else None
        kind = section_of(info.annotation)[0] if info else None
    return kind


def field_at(parts: tuple[Part, ...]) -> FieldInfo | None:
    """Return the language's field at a path, or None; for an item of a list, the list's field."""
    names = [part for part in parts if isinstance(part, str)]
    if not names:
        return None
    kind = section_at(tuple(names[:-1]))
    return kind.model_fields.get(names[-1]) if kind else None


def choices_of(annotation: Any) -> tuple[list[str], bool]:
    """Return the words of the Literal within an annotation, and whether null is one of the choices."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return [str(word) for word in arguments], False
    if origin in (Annotated, list):
        return choices_of(arguments[0])
    if origin in (Union, types.UnionType):
        words = [word for argument in arguments for word in choices_of(argument)[0]]
        return words, type(None) in arguments or any(choices_of(argument)[1] for argument in arguments)
    return [], False


@cache
def paths_of_keys() -> dict[str, list[str]]:
    """Return the paths at which the language has each key."""
    out: dict[str, list[str]] = {}
    for path in _all_paths():
        out.setdefault(path.rpartition(".")[2], []).append(path)
    return out


def _all_paths(kind: type[Section] = Recipe, where: str = "") -> Iterator[str]:
    for name, info in kind.model_fields.items():
        path = f"{where}.{name}" if where else name
        inner, is_list = section_of(info.annotation)
        yield path
        if inner is not None and not is_list:
            yield from _all_paths(inner, path)
