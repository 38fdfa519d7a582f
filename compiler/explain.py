"""`recipe explain`: each value, where it comes from, and what it turns into."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from compiler.meaning import detail, summary
from compiler.wording import flow, table
from spec.diagnostics import Diagnostic
from spec.paths import Part, join, split

if TYPE_CHECKING:
    from compiler.program import Program
    from spec.language import Section
    from spec.load import Loaded

WIDTH = 100
"""Columns to which descriptions are wrapped."""


def explain(program: Program, loaded: Loaded, path: str | None = None) -> str:
    """The text that the command prints.

    Args:
        program: of the recipe.
        loaded: the same recipe with its sources.
        path: a section or key, for all there is to say about it; None for the whole recipe in short.
    """
    if path is None:
        return _whole(program, loaded)
    parts = split(path)
    out = [*_described(program.recipe, parts), ""]
    values = [(p, v) for p, v in leaves(program.recipe) if p[: len(parts)] == parts]
    out += table([_row(p, v, loaded) for p, v in values])
    said = detail(parts, program)
    if said:
        out += ["", *said]
    return "\n".join(out) + "\n"


def unknown_path(path: str, loaded: Loaded) -> Diagnostic | None:
    """What is wrong with a path that a user asks about, None when it names a section or key."""
    recipe = loaded.recipe
    if recipe is None:
        return None
    known: dict[str, None] = {}
    for parts, _ in leaves(recipe):
        for end in range(1, len(parts) + 1):
            known.setdefault(join(parts[:end]))
    if path in known:
        return None
    try:
        first = split(path)[:1]
    except ValueError:
        first = ()
    absent = [name for name in ("lora", "serve") if first == (name,) and getattr(recipe, name) is None]
    if absent:
        return Diagnostic(
            "E0040",
            f"the recipe has no section `{absent[0]}`",
            "",
            f"add it: `recipe schema` lists the keys of {absent[0]}",
        )
    close = get_close_matches(path, list(known), n=1, cutoff=0.4)
    last = re.split(r"[.\[]", path)[-1]
    ending = [name for name in known if name.rpartition(".")[2] == last]
    near = ending[:1] or close
    help = f"did you mean `{near[0]}`?" if near else f"sections are {', '.join(type(recipe).model_fields)}"
    return Diagnostic("E0040", f"`{path}` is no section or key of the recipe", "", help)


def leaves(section: Section, above: tuple[Part, ...] = ()) -> Iterator[tuple[tuple[Part, ...], Any]]:
    """Every value of a recipe with its path, in the order of the language. Lists of plain values are one."""
    from spec.language import Section

    for name in type(section).model_fields:
        value, path = getattr(section, name), (*above, name)
        if isinstance(value, Section):
            yield from leaves(value, path)
        elif isinstance(value, list) and value and isinstance(value[0], Section):
            for index, item in enumerate(value):
                yield from leaves(item, (*path, index))
        elif isinstance(value, dict) and value:
            for key, item in value.items():
                yield (*path, key), item
        else:
            yield path, value


def _whole(program: Program, loaded: Loaded) -> str:
    recipe = program.recipe
    out = []
    sections: dict[str, list[tuple[tuple[Part, ...], Any]]] = {}
    for parts, value in leaves(recipe):
        # recipe, name and extends make one block.
        sections.setdefault(str(parts[0]) if len(parts) > 1 else "", []).append((parts, value))
    for name, values in sections.items():
        out += table([_row(parts, value, loaded) for parts, value in values])
        out += [f"  -> {line}" for line in summary(name, program)]
        out.append("")
    return "\n".join(out).rstrip("\n") + "\n"


def _row(parts: tuple[Part, ...], value: Any, loaded: Loaded) -> list[str]:
    path = join(parts)
    return [path, flow(value), str(loaded.sources.origin(path))]


def _described(recipe: Any, parts: tuple[Part, ...]) -> list[str]:
    """The path, and what the schema says of it."""
    from textwrap import wrap

    from spec.language import Section

    node, text = recipe, ""
    for part in parts:
        if isinstance(node, Section) and isinstance(part, str):
            text = type(node).model_fields[part].description or ""
            node = getattr(node, part)
        elif isinstance(node, list) and isinstance(part, int):
            node = node[part]
    return [join(parts), *(f"  {line}" for line in wrap(text, WIDTH - 2))]
