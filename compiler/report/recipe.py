"""The recipe of a run: its values with their sources, and the differences between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.explain.explain import leaves
from recipec.compiler.lowering.recorded import from_record
from recipec.spec.core_schema import flow
from recipec.spec.paths import Part, join

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.report.run import Run
    from recipec.spec.language import Recipe
    from recipec.spec.load import Loaded

ABSENT = "(none)"


@dataclass(frozen=True)
class Resolved:
    """The recipe in a lock file.

    Attributes:
        problem: a sentence on why the recipe or the program is missing; "" if both are there.
    """

    recipe: Recipe | None
    program: Program | None
    problem: str = ""


@dataclass(frozen=True)
class Value:
    """A line of the table; `default` is true if the recipe does not set the value."""

    path: str
    value: str
    origin: str
    default: bool


@dataclass(frozen=True)
class Section:
    """Values of one section of a recipe, and what they mean for the run."""

    name: str
    values: tuple[Value, ...]
    meaning: tuple[str, ...]

    @property
    def given(self) -> list[Value]:
        return [value for value in self.values if not value.default]


def resolved(values: Mapping[str, Any], folder: str) -> Resolved:
    """Read the recipe in a lock, and its program if this version can build one.

    Args:
        folder: of the run; missing files of the recipe are resolved relative to it.
    """
    from recipec.compiler.lowering.lower import lower
    from recipec.spec.load import load

    loaded = load(Path(folder) / "recipe.json", text=json.dumps(from_record(values)))
    if loaded.recipe is None:
        reason = loaded.diagnostics[0].message if loaded.diagnostics else "nothing says why"
        return Resolved(None, None, f"This version does not read the recipe of recipe.lock.json: {reason}.")
    return Resolved(loaded.recipe, lower(loaded, planning=True).program)


def matching(recipe: Recipe, file: Path, text: str | None) -> Loaded | None:
    """Return a recipe's file if it gives the same values; None otherwise.

    Args:
        text: the file's content; None to read it.
    """
    from recipec.spec.load import load

    loaded = load(file, text=text)
    if loaded.recipe is None:
        return None
    mine, other = (dict(leaves(one)) for one in (recipe, loaded.recipe))
    left_open: set[tuple[Part, ...]] = {("extends",)}
    if loaded.recipe.model.revision is None:  # the folder of an added model sets it
        left_open.add(("model", "revision"))
    return loaded if all(mine.get(key) == other.get(key) for key in {*mine, *other} - left_open) else None


def sections(run: Run) -> list[Section]:
    """Return the recipe, section by section; [] if it is not known."""
    from recipec.compiler.explain.explain import summary

    if run.recipe is None:
        return []
    found: dict[str, list[Value]] = {}
    for parts, value in leaves(run.recipe):
        name = str(parts[0]) if len(parts) > 1 else ""
        found.setdefault(name, []).append(_value(run, parts, value))
    return [
        Section(name, tuple(values), tuple(summary(name, run.program)) if run.program else ())
        for name, values in found.items()
    ]


def differences(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return the paths whose values differ between runs, each with the value in every run."""
    every = [
        {join(parts): value for parts, value in leaves(run.recipe)} if run.recipe else None for run in runs
    ]
    known = [values for values in every if values is not None]
    paths = dict.fromkeys(path for values in known for path in values)
    out = []
    for path in paths:
        cells = ["not known" if v is None else _shown(v, path) for v in every]
        if len({cell for cell, values in zip(cells, every, strict=True) if values is not None}) > 1:
            out.append((path, cells))
    return out


def words(before: Run, after: Run) -> list[str]:
    """Describe what changes from one run to the other; [] if one of the programs is not known."""
    from recipec.compiler.explain.diff import words as said

    if before.program is None or after.program is None:
        return []
    return said(before.program, after.program)


def _value(run: Run, parts: tuple[Part, ...], value: Any) -> Value:
    path = join(parts)
    if run.loaded is not None:
        origin = run.loaded.sources.origin(path)
        return Value(path, flow(value), str(origin), origin.kind == "default")
    default = _is_default(run.recipe, parts, value)
    return Value(path, flow(value), "as by default" if default else "the recipe", default)


def _is_default(node: Any, parts: tuple[Part, ...], value: Any) -> bool:
    """Return whether a value equals the language's default."""
    from recipec.spec.language import Section as Node

    owner, key = None, None
    for part in parts:
        owner, key = node, part
        node = getattr(node, part) if isinstance(node, Node) and isinstance(part, str) else node[part]
    if not isinstance(owner, Node) or not isinstance(key, str):
        return False
    field = type(owner).model_fields[key]
    if field.is_required():
        return False
    # Some defaults depend on other keys of their section.
    default = field.get_default(call_default_factory=True, validated_data=dict(owner))
    return bool(default == value)


def _shown(values: Mapping[str, Any], path: str) -> str:
    if path not in values:
        return ABSENT
    return flow(values[path])
