"""Read and check several recipes that are built or checked together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from recipec.compiler.cli.reading import read
from recipec.compiler.lower import Lowered
from recipec.compiler.lowering.references import outside
from recipec.compiler.terminal import each
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import Loaded, display, locate


def read_together(
    recipes: Sequence[Path], sets: Sequence[str] | None
) -> tuple[list[tuple[Loaded, Lowered]], list[Diagnostic]]:
    """Load and lower recipes one after the other, and return their diagnostics too."""
    pairs = [read(path, sets) for path in each("checking", recipes)]
    of_recipes = [diagnostic for _, lowered in pairs for diagnostic in lowered.diagnostics]
    return pairs, [*of_recipes, *_same_names(pairs), *_same_places(pairs)]


E0041 = Code(
    "E0041",
    "two recipes with the same name",
    cause="Two of the recipes that are built together have the same name, and would write the same folder.",
    cure="Give one of them another name.",
)


def _same_names(pairs: Sequence[tuple[Loaded, Lowered]]) -> list[Diagnostic]:
    """Report recipes with the same name, which would write the same folder."""
    out: list[Diagnostic] = []
    first: dict[str, Path] = {}
    for loaded, lowered in pairs:
        if lowered.program is None:
            continue
        name = lowered.program.name
        if name in first:
            message = f"{display(first[name])} is also named `{name}`: both would write the same folder"
            problem = Diagnostic(E0041, message, "name", "give one of them another name")
            out += locate([problem], loaded.sources)
        first.setdefault(name, loaded.path)
    return out


E0043 = Code(
    "E0043",
    "two recipes write the same place",
    cause="Two of the recipes that are checked or built together have the same address in "
    "checkpoint.directory or merge.output. They often have it from one base that both extend. Each "
    "run would continue from, or replace, the other's checkpoints.",
    cure="Give each recipe a place of its own.",
)


N0044 = Code(
    "N0044",
    "a place from the base",
    cause="checkpoint.directory or merge.output is an address that comes from the recipe that this "
    "one extends. Every recipe that extends it, and the base itself, writes to the same place.",
    cure="Give the recipe a place of its own.",
)


def _same_places(pairs: Sequence[tuple[Loaded, Lowered]]) -> list[Diagnostic]:
    """Report places outside of the artifacts that two recipes write, or that a recipe has from its base."""
    out: list[Diagnostic] = []
    first: dict[str, tuple[Path, str, str]] = {}
    for loaded, lowered in pairs:
        if (program := lowered.program) is None:
            continue
        for path, place in outside(program.recipe).items():
            file, name, key = first.setdefault(place, (loaded.path, program.name, path))
            inherited = loaded.sources.origin(path).kind == "extends"
            if name != program.name:
                code = E0043
                message = (
                    f"{display(file)} writes {place} too ({key}): one run would replace the other's files"
                )
            elif inherited:
                code, message = N0044, f"other recipes that extend this base write {place} too"
            else:
                continue
            section, _, key = path.partition(".")
            setting = f"{key}: {_place_of(place, program.name)}"
            help = f"in {display(loaded.path)}: {section}: {{{setting}}}" if inherited else setting
            out += locate([Diagnostic(code, message, path, help)], loaded.sources)
    return out


def _place_of(place: str, name: str) -> str:
    """Return a place for a recipe next to a place of another recipe, or below it if it is a whole bucket."""
    return f"{place}-{name}" if "/" in place.partition("://")[2] else f"{place}/{name}"
