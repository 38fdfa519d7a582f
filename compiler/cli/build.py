"""The commands `recipe build` and `recipe check`: many recipes at once."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from recipec.compiler.cli.base import (
    FAILED,
    Output,
    Recipes,
    Sets,
    Shown,
    doing,
    end_build,
    fail,
    has_errors,
    note,
    on_ctrl_c,
    read,
    result,
    say,
    show,
    tell,
)
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.backend import Backend, others
from recipec.compiler.terminal import manner
from recipec.compiler.wording import listing, plural
from recipec.spec.codes import Code

if TYPE_CHECKING:
    from recipec.compiler.lower import Lowered
    from recipec.compiler.lowering.program import Program
    from recipec.spec.diagnostics import Diagnostic
    from recipec.spec.load import Loaded


RUNTIMES = ("wheel", "source")
"""What a build writes next to the artifacts for them to run on."""


def _runtime(value: str | None) -> str | None:
    """Refuse an unknown --runtime, and that of an earlier version with today's spelling."""
    if value == "copy":
        raise typer.BadParameter("`copy` copied some modules until 0.2; --runtime source copies all of them")
    if value is not None and value not in RUNTIMES:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, RUNTIMES))}.")
    return value


def build(
    recipes: Recipes,
    output: Output = Path("generated"),
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing. Exit with 1 and show a diff if an artifact is stale."),
    ] = False,
    backend: Annotated[
        list[Backend] | None,
        typer.Option(
            "--backend",
            help="Another backend to build for: trl writes baseline/, torchax writes train_torchax.py, tunix "
            "writes neither; may be repeated. By default the backends of the artifact on disk.",
        ),
    ] = None,
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Also remove the artifacts of renamed or removed recipes. With --check, fail if there are "
            "any.",
        ),
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also replace files that no build wrote; a copy of each is kept."),
    ] = False,
    runtime: Annotated[
        str | None,
        typer.Option(
            "--runtime",
            metavar="[wheel|source]",
            callback=_runtime,
            help="What the scripts run on: wheel is recipec-runtime, once next to the artifacts, which "
            "requirements-train.txt names by hash; source also copies runtime/ there, to read or change it, "
            "and the scripts use that. By default the choice of the folder's last build, and wheel for a new "
            "folder.",
        ),
    ] = None,
    notebook: Annotated[
        bool | None,
        typer.Option(
            "--notebook/--no-notebook",
            help="Also write a notebook, for Colab (v5e-1, v6e-1), Kaggle (v5e-8) or a CPU. By default the "
            "choice of the artifact on disk.",
        ),
    ] = None,
    sets: Sets = None,
    format: Shown = "text",
) -> None:
    """Write the artifacts of recipes, or check that they are up to date."""
    from recipec.compiler.artifacts import artifact
    from recipec.compiler.artifacts.runtime import wheel_file
    from recipec.compiler.artifacts.whole import interrupted
    from recipec.compiler.checks.backends import diagnosed
    from recipec.compiler.emitters import notebook as notebooks
    from recipec.spec.diagnostics import in_order
    from recipec.spec.load import locate

    if not check:
        end_build(output)
    elif interrupted(output):
        raise ArtifactError(
            f"a build in {output} was cut short, so its artifacts may have files of two builds",
            "complete it: the same command without --check",
        )
    pairs = _read_all(recipes, sets)
    found = [*(d for _, item in pairs for d in item.diagnostics), *_same_names(pairs), *_same_places(pairs)]
    programs: dict[str, tuple[Program, tuple[Backend, ...]]] = {}
    for loaded, item in pairs:
        if item.program is None:
            continue
        # Without an option, what the artifact on disk was built for.
        folder = output / item.program.name
        names = artifact.backends_of(folder) if backend is None else [one.value for one in backend]
        noted = artifact.has_notebook(folder) if notebook is None else notebook
        program = replace(item.program, notebook=noted)
        said = [*diagnosed(program, others(names)), *(notebooks.check(program) if noted else ())]
        found += locate(said, loaded.sources)
        programs[program.name] = program, others(names)
    diagnostics = in_order(found)
    if has_errors(diagnostics):
        fail(diagnostics, format)
    show(diagnostics, format)
    from recipec.compiler.emitters.emit import emit
    from recipec.compiler.terminal import each

    artifacts = {}
    for name, (program, backends) in each("making the artifacts", list(programs.items())):
        with doing(f"making {name}"):
            artifacts[name] = emit(program, backends)
    again = " ".join(
        [
            "recipe build",
            *(quote(str(path)) for path in recipes),
            *_as_options(output, sets, backend, runtime, notebook),
        ]
    )
    left = _left_over(output, artifacts, recipes)
    source = None if runtime is None else runtime == "source"
    if check:
        stale = artifact.check(output, artifacts, source)
        if stale and not manner.quiet:
            result("".join(map(str, stale)), end="")
        if stale:
            named = [f"{one.path} {one.state}" for one in stale[:3]]
            more = [plural(len(stale) - 3, "other difference")] if len(stale) > 3 else []
            say(f"error: {output} does not match the recipes: {listing([*named, *more])}")
            say(f"  = help: build it again: {again}{' --prune' if prune else ''}")
        for name in left:
            kind = "error" if prune else "warning"
            say(f"{kind}: {output / name} is left over: no recipe is named {name}")
        if left:
            say(f"  = help: remove what a build wrote: {again} --prune")
        if stale or (left and prune):
            raise typer.Exit(FAILED)
        if not (output / wheel_file()).is_file():
            note(f"note: {output / wheel_file()} is missing; write it: {again}")
        if format == "text":
            tell(f"{output}: {plural(len(artifacts), 'artifact')} up to date")
        return
    on_ctrl_c(
        lambda: (
            f"{output} is unchanged"
            if artifact.check(output, artifacts, source)
            else f"{output} is complete and up to date"
        )
    )
    with doing(f"writing {output}"):
        notes = artifact.write(output, artifacts, force, f"{again} --force", left if prune else (), source)
    if not prune:
        notes += [
            f"note: {output / name} is left over: no recipe is named {name}; see --prune" for name in left
        ]
    for line in notes:
        (note if line.startswith("note: ") else say)(line)
    if format == "text":
        for name, files in artifacts.items():
            tell(f"{output / name}: {plural(len(files), 'file')}")


def check(recipes: Recipes, sets: Sets = None, format: Shown = "text") -> None:
    """Check recipes against the language, the model and the hardware."""
    from recipec.spec.diagnostics import in_order

    pairs = _read_all(recipes, sets)
    found = [*(d for _, item in pairs for d in item.diagnostics), *_same_names(pairs), *_same_places(pairs)]
    found += [] if has_errors(found) else _planned_before(pairs)
    diagnostics = in_order(found)
    if has_errors(diagnostics):
        fail(diagnostics, format)
    show(diagnostics, format)
    if format == "text":
        for path in recipes:
            tell(f"{path}: ok")


def _read_all(recipes: Sequence[Path], sets: Sequence[str] | None) -> list[tuple[Loaded, Lowered]]:
    """Load and lower recipes one after the other."""
    from recipec.compiler.terminal import each

    return [read(path, sets) for path in each("checking", recipes)]


def _planned_before(pairs: Sequence[tuple[Loaded, Lowered]]) -> list[Diagnostic]:
    """Return the warnings of earlier plans of these recipes' steps, without compiling anything."""
    from recipec.compiler import store

    if not store.folder().is_dir():
        return []
    from recipec.compiler.plan.fit import warning
    from recipec.compiler.plan.step_memory import remembered
    from recipec.spec.load import locate

    out: list[Diagnostic] = []
    for loaded, lowered in pairs:
        program = lowered.program
        if program is None or program.accelerator.platform != "tpu" or (made := remembered(program)) is None:
            continue
        found = warning(program, made)
        out += [] if found is None else locate([found], loaded.sources)
    return out


def _left_over(output: Path, names: Collection[str], recipes: Sequence[Path]) -> list[str]:
    """Return the artifacts that no recipe builds: none of these, of their folders, of recipes/ or here."""
    from recipec.compiler.artifacts.artifact import artifacts_in

    left = {*artifacts_in(output)} - {*names}
    if not left:
        return []
    folders = [
        *(path.parent for path in recipes),
        output.resolve().parent / "recipes",
        Path("recipes"),
        Path(),
    ]
    for folder in dict.fromkeys(folder.resolve() for folder in folders):
        for file in [*folder.glob("*.yaml"), *folder.glob("*.yml")]:
            left -= _names_in(file)
    return sorted(left)


def _names_in(file: Path) -> set[str]:
    """Return the name that a recipe's file contains, or the file's stem if it has no readable name."""
    from recipec.spec.load import load

    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {file.stem}
    if plain := re.search(r"^name:[ \t]*([a-z0-9-]+)[ \t]*(?:#.*)?$", text, re.MULTILINE):
        return {plain[1]}
    return {str(load(file).raw.get("name", file.stem))}


E0041 = Code(
    "E0041",
    "two recipes with the same name",
    cause="Two of the recipes that are built together have the same name, and would write the same folder.",
    cure="Give one of them another name.",
)


def _same_names(pairs: Sequence[tuple[Loaded, Lowered]]) -> list[Diagnostic]:
    """Report recipes with the same name, which would write the same folder."""
    from recipec.spec.diagnostics import Diagnostic
    from recipec.spec.load import display, locate

    out: list[Diagnostic] = []
    first: dict[str, Path] = {}
    for loaded, lowered in pairs:
        if lowered.program is None:
            continue
        name = lowered.program.name
        if name in first:
            message = f"{display(first[name])} is also named `{name}`: both would write the same folder"
            found = Diagnostic(E0041, message, "name", "give one of them another name")
            out += locate([found], loaded.sources)
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
    from recipec.compiler.lowering.references import outside
    from recipec.spec.diagnostics import Diagnostic
    from recipec.spec.load import display, locate

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
            given = f"{key}: {_place_of(place, program.name)}"
            help = f"in {display(loaded.path)}: {section}: {{{given}}}" if inherited else given
            out += locate([Diagnostic(code, message, path, help)], loaded.sources)
    return out


def _place_of(place: str, name: str) -> str:
    """Return a place for a recipe next to a place of another recipe, or below it if it is a whole bucket."""
    return f"{place}-{name}" if "/" in place.partition("://")[2] else f"{place}/{name}"


def _as_options(
    output: Path,
    sets: Sequence[str] | None,
    backends: Sequence[Backend] | None,
    runtime: str | None,
    notebook: bool | None,
) -> list[str]:
    chosen = [] if output == Path("generated") else ["-o", quote(str(output))]
    chosen += [word for backend in backends or () for word in ("--backend", backend.value)]
    chosen += ["--runtime", runtime] if runtime is not None else []
    chosen += [] if notebook is None else ["--notebook" if notebook else "--no-notebook"]
    return [*chosen, *(word for item in sets or () for word in ("--set", quote(item)))]
