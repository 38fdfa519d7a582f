"""`recipe build`."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote

import typer

from recipec.compiler.artifacts import artifact
from recipec.compiler.artifacts.artifact import artifacts_in
from recipec.compiler.artifacts.runtime import wheel_file
from recipec.compiler.artifacts.whole import interrupted
from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.cli.arguments.recipes import BuildArguments
from recipec.compiler.cli.builds import end_build
from recipec.compiler.cli.guard import FAILED
from recipec.compiler.cli.printing import fail, show
from recipec.compiler.cli.together import read_together
from recipec.compiler.emitters import notebook as notebooks
from recipec.compiler.emitters.emit import emit
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.backend import Backend, others
from recipec.compiler.lowering.program import Program
from recipec.compiler.terminal import doing, each, manner, note, on_ctrl_c, result, say, tell
from recipec.compiler.wording import listing, plural
from recipec.spec.diagnostics import has_errors, in_order
from recipec.spec.load import load, locate


def build(args: BuildArguments) -> None:
    """Run `recipe build`."""
    if not args.check:
        end_build(args.output)
    elif interrupted(args.output):
        raise ArtifactError(
            f"a build in {args.output} was cut short, so its artifacts may have files of two builds",
            "complete it: the same command without --check",
        )
    pairs, diagnostics = read_together(args.recipes, args.sets)
    programs: dict[str, tuple[Program, tuple[Backend, ...]]] = {}
    for loaded, lowered in pairs:
        if lowered.program is None:
            continue
        # Without an option, what the artifact on disk was built for.
        folder = args.output / lowered.program.name
        names = (
            artifact.backends_of(folder)
            if args.backend is None
            else [backend.value for backend in args.backend]
        )
        notebook = artifact.has_notebook(folder) if args.notebook is None else args.notebook
        program = replace(lowered.program, notebook=notebook)
        of_options = [*diagnosed(program, others(names)), *(notebooks.check(program) if notebook else ())]
        diagnostics += locate(of_options, loaded.sources)
        programs[program.name] = program, others(names)
    diagnostics = in_order(diagnostics)
    if has_errors(diagnostics):
        fail(diagnostics, args.format)
    show(diagnostics, args.format)

    artifacts = {}
    for name, (program, backends) in each("making the artifacts", list(programs.items())):
        with doing(f"making {name}"):
            artifacts[name] = emit(program, backends)
    again = " ".join(
        [
            "recipe build",
            *(quote(str(path)) for path in args.recipes),
            *_as_options(args.output, args.sets, args.backend, args.runtime, args.notebook),
        ]
    )
    left = _left_over(args.output, artifacts, args.recipes)
    source = None if args.runtime is None else args.runtime == "source"
    if args.check:
        stale = artifact.check(args.output, artifacts, source)
        if stale and not manner.quiet:
            result("".join(map(str, stale)), end="")
        if stale:
            named = [f"{file.path} {file.state}" for file in stale[:3]]
            more = [plural(len(stale) - 3, "other difference")] if len(stale) > 3 else []
            say(f"error: {args.output} does not match the recipes: {listing([*named, *more])}")
            say(f"  = help: build it again: {again}{' --prune' if args.prune else ''}")
        for name in left:
            kind = "error" if args.prune else "warning"
            say(f"{kind}: {args.output / name} is left over: no recipe is named {name}")
        if left:
            say(f"  = help: remove what a build wrote: {again} --prune")
        if stale or (left and args.prune):
            raise typer.Exit(FAILED)
        if not (args.output / wheel_file()).is_file():
            note(f"note: {args.output / wheel_file()} is missing; write it: {again}")
        if args.format == "text":
            tell(f"{args.output}: {plural(len(artifacts), 'artifact')} up to date")
        return
    on_ctrl_c(
        lambda: (
            f"{args.output} is unchanged"
            if artifact.check(args.output, artifacts, source)
            else f"{args.output} is complete and up to date"
        )
    )
    with doing(f"writing {args.output}"):
        notes = artifact.write(
            args.output, artifacts, args.force, f"{again} --force", left if args.prune else (), source
        )
    if not args.prune:
        notes += [
            f"note: {args.output / name} is left over: no recipe is named {name}; see --prune"
            for name in left
        ]
    for line in notes:
        (note if line.startswith("note: ") else say)(line)
    if args.format == "text":
        for name, files in artifacts.items():
            tell(f"{args.output / name}: {plural(len(files), 'file')}")


def _left_over(output: Path, names: Collection[str], recipes: Sequence[Path]) -> list[str]:
    """Return the artifacts that no recipe builds: none of these, of their folders, of recipes/ or here."""
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
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {file.stem}
    if plain := re.search(r"^name:[ \t]*([a-z0-9-]+)[ \t]*(?:#.*)?$", text, re.MULTILINE):
        return {plain[1]}
    return {str(load(file).raw.get("name", file.stem))}


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
