"""The recipe of a run: its values with their sources and their meaning, and the differences between runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.explain.diff import words
from recipec.compiler.explain.explain import leaves, summary
from recipec.compiler.lower import lower
from recipec.compiler.lowering.facts import AUTO
from recipec.compiler.lowering.recorded import from_record
from recipec.compiler.pages.document import Items, Section, Table, Text
from recipec.spec.core_schema import flow
from recipec.spec.key_paths import Part, join
from recipec.spec.language import Section as Node
from recipec.spec.load import load
from recipec.spec.structure import field_at

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.report.recorded_run import ReportedRun
    from recipec.spec.language import Recipe
    from recipec.spec.load import Loaded

NONE = "The recipe is not known: there is no recipe.lock.json that this version reads."
KNOWN = "Each value with its place in the recipe."
NOT_KNOWN = (
    "From recipe.lock.json; the recipe's own file, which has the line of each value, is not known: "
    "--recipe FILE names it."
)


def recipe_section(run: ReportedRun) -> Section:
    """Return the section with the recipe's values, and what they mean for the run."""
    if run.recipe is None:
        return Section("recipe", "Recipe", (), (Text(NONE, ""),))
    values: dict[str, list[tuple[str, ...]]] = {}
    defaults: list[tuple[str, ...]] = []
    for parts, value in leaves(run.recipe):
        rows = values.setdefault(str(parts[0]) if len(parts) > 1 else "", [])
        origin, default = _origin(run, parts, value)
        (defaults if default else rows).append((join(parts), flow(value), origin))
    blocks: list[Any] = []
    for name, rows in values.items():
        meaning = summary(name, run.program) if run.program else []
        blocks += [Text(name or "recipe", "heading")] if rows or meaning else []
        blocks += [_table(rows)] if rows else []
        blocks += [Items(meaning)] if meaning else []
    blocks.append(_table(defaults, "Values that the recipe does not give"))
    return Section("recipe", "Recipe", (KNOWN if run.loaded else NOT_KNOWN,), blocks)


def _table(rows: Sequence[tuple[str, ...]], folded: str = "") -> Table:
    return Table(("key", "value", "from"), rows, words=(1, 2), folded=folded, label="Values")


def _origin(run: ReportedRun, parts: tuple[Part, ...], value: Any) -> tuple[str, bool]:
    """Return where a value comes from, and whether it is a default."""
    if run.loaded is not None:
        origin = run.loaded.sources.origin(join(parts))
        return str(origin), origin.kind == "default"
    default = _is_default(run.recipe, parts, value)
    field = field_at(parts)
    stated = "the recipe, or auto" if field is not None and field.default == AUTO else "the recipe"
    return "as by default" if default else stated, default


def _is_default(node: Any, parts: tuple[Part, ...], value: Any) -> bool:
    """Return whether a value equals the language's default."""
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
    return bool(field.get_default(call_default_factory=True, validated_data=dict(owner)) == value)


def differences(runs: Sequence[ReportedRun]) -> list[Any]:
    """Return blocks with the values that differ between runs, and what changes from the first to each."""
    every = [{join(p): flow(v) for p, v in leaves(run.recipe)} if run.recipe else None for run in runs]
    known = [values for values in every if values is not None]
    rows = []
    for path in dict.fromkeys(path for values in known for path in values):
        if len({values.get(path, "(none)") for values in known}) > 1:
            cells = ("not known" if values is None else values.get(path, "(none)") for values in every)
            rows.append((path, *cells))
    head, columns = ("value", *(run.label for run in runs)), tuple(range(1, len(runs) + 1))
    same = Text("No value of their recipes differs, as far as these are known.", "")
    blocks: list[Any] = [Text("What differs in their recipes", "heading")]
    blocks.append(Table(head, rows, words=columns, label="Values that differ") if rows else same)
    first = runs[0]
    for run in runs[1:]:
        changes = words(first.program, run.program) if first.program and run.program else []
        if changes:
            blocks += [Text(f"From {first.label} to {run.label}", "heading"), Items(changes)]
    return blocks


def resolved(values: Mapping[str, Any], folder: str) -> tuple[Recipe | None, Program | None, str]:
    """Read the recipe in a lock, its program if this version can build one, and why one of them is missing.

    Args:
        folder: of the run; missing files of the recipe are resolved relative to it.
    """
    loaded = load(Path(folder) / "recipe.json", text=json.dumps(from_record(values)))
    if loaded.recipe is None:
        reason = loaded.diagnostics[0].message if loaded.diagnostics else "nothing says why"
        return None, None, f"This version does not read the recipe of recipe.lock.json: {reason}."
    return loaded.recipe, lower(loaded, planning=True).program, ""


def matching(recipe: Recipe, file: Path, text: str | None) -> Loaded | None:
    """Return a recipe's file if it gives the same values; None otherwise.

    Args:
        text: the file's content; None to read it.
    """
    loaded = load(file, text=text)
    if loaded.recipe is None:
        return None
    program = lower(loaded, planning=True).program  # the lock has the values that `auto` stands for
    mine, other = (dict(leaves(side)) for side in (recipe, program.recipe if program else loaded.recipe))
    left_open: set[tuple[Part, ...]] = {("extends",)}
    if loaded.recipe.model.revision is None:  # the folder of an added model sets it
        left_open.add(("model", "revision"))
    return loaded if all(mine.get(key) == other.get(key) for key in {*mine, *other} - left_open) else None
