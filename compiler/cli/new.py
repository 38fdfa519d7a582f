"""`recipe new`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from tempfile import TemporaryDirectory
from typing import NoReturn, get_args

import typer

from recipec.compiler.artifacts.artifact import SCHEMA
from recipec.compiler.catalog import is_directory
from recipec.compiler.checks.train import N0527
from recipec.compiler.cli.arguments.new import DataFormat, NewArguments
from recipec.compiler.cli.guard import MISUSED
from recipec.compiler.cli.printing import show
from recipec.compiler.errors import ArtifactError
from recipec.compiler.new import ask, hooks, new_recipe, written_files
from recipec.compiler.new.data_source import PLACEHOLDER, NewData, as_turns, combined, is_within, look, placed
from recipec.compiler.new.draft import Probe
from recipec.compiler.new.fetched_models import NewModels, completed
from recipec.compiler.new.machines import TITLES, generation_of, named, of_generation
from recipec.compiler.new.new_recipe import Made
from recipec.compiler.new.written_files import linked, refuse_existing
from recipec.compiler.terminal import note, say, tell
from recipec.compiler.wording import as_typed, listing
from recipec.spec.schema import text as schema

FOLDER = Path("recipes")
"""Where recipes lie, unless their data lies elsewhere."""


def new(args: NewArguments) -> None:
    """Run `recipe new`."""
    asking = ask.possible()
    _demand(asking, args.model, args.accelerator)
    if refused := new_recipe.refusal_of_name(args.name):
        raise typer.BadParameter(refused, param_hint="NAME")
    source = None
    if args.data:
        source = combined([_source(path, args.format) for path in args.data])
    elif not asking:
        source = _source(None, args.format)
    if source is not None:
        _target(args.name, args.output, source)  # before anything is asked

    with TemporaryDirectory() as scratch:
        models = NewModels(Path(scratch), _folders(args.output))

        def look(text: str) -> Probe:
            spelled = new_recipe.spelled(text, Path())
            folder = Path() if is_directory(spelled) else models.folder(spelled)
            return new_recipe.look(args.name, spelled, args.method, folder / f"{args.name}.yaml")

        model = ask.model(look) if args.model is None else completed(args.model)
        if args.model not in (None, model):
            note(f"note: {args.model} is {model}")
        if args.accelerator is None:
            machine = ask.accelerator(look(model), args.method)
        elif (generation := generation_of(args.accelerator)) is not None:
            machine = of_generation(look(model), generation, args.method)
        else:
            machine = named(args.accelerator)
        source = source or ask.data(lambda text: _source(text, args.format))
        target = _target(args.name, args.output, source)
        spelled = new_recipe.spelled(model, target.parent)
        if brought := models.settle(spelled, target.parent):
            tell(brought)
    usual = new_recipe.usual_format(spelled, args.method, target)
    turned = source.parts if usual == "text" else tuple(as_turns(part) for part in source.parts)
    first, *others = (_with_format(part, usual, asking) for part in turned)
    source = replace(source, format=first.format, fields=first.fields, others=tuple(others))
    server = ask.serve() if args.serve is None and asking else ask.server(args.serve or ask.NO_SERVER)
    github, pre_commit = args.github, args.pre_commit
    if asking and not (github or pre_commit) and (hooks.root(target.parent) / ".git").exists():
        github = ask.confirm("Should GitHub Actions check the recipes at each push?")
        pre_commit = ask.confirm("Should pre-commit check them before each commit?")
    for part in source.parts:
        if columns := part.columns_read():
            tell(f"{part.path}: {columns}")
    source, links = placed(source, target.parent)
    options = new_recipe.NewRecipeOptions(args.name, spelled, machine, args.method, source, server, target)
    with linked(links):
        _write(new_recipe.make(options), target, github, pre_commit)
    for path, place in links.items():
        tell(f"{path}: a link to {place}; on another machine, put the data there")
    if links:
        note("note: `recipe check` does not read samples behind a link; `recipe preview` does")


def _demand(asking: bool, model: str | None, accelerator: str | None) -> None:
    """Refuse missing values that only the user knows, if the command cannot ask."""
    missing = [flag for flag, value in (("--model", model), ("--accelerator", accelerator)) if value is None]
    if missing and not asking:
        _misused(f"give {listing(missing)}: the command can ask for missing values only on a terminal")


def _misused(message: str) -> NoReturn:
    say(f"error: {message}")
    raise typer.Exit(MISUSED)


def _source(data: str | None, format: DataFormat | None) -> NewData:
    """Describe the data. A local file's path stays as it was typed.

    Raises:
        ArtifactError: there is no such file, or it cannot be used.
    """
    if data is None or (data == PLACEHOLDER and not Path(data).exists()):
        return NewData(PLACEHOLDER, format)
    if "://" in data:
        return NewData(data, format)
    if not Path(data).exists():
        raise ArtifactError(
            f"there is no {data}", f"name an existing file, or {PLACEHOLDER}, which you can add later"
        )
    return look(Path(data), format)


def _target(name: str, output: Path | None, source: NewData) -> Path:
    """Return the recipe's path.

    Raises:
        ArtifactError: the path exists, or cannot be written.
    """
    target = _folder(output, source) / f"{name}.yaml"
    refuse_existing(target, "choose another name, or another folder with -o")
    return target


def _folder(output: Path | None, source: NewData) -> Path:
    """Return the folder that contains most of the data's files; the first of equal ones."""
    local = [Path(part.path) for part in source.parts if "://" not in part.path]
    local = [path for path in local if path.exists()]
    return max(_folders(output), key=lambda folder: sum(is_within(path, folder) for path in local))


def _folders(output: Path | None) -> list[Path]:
    """Return the folders that a recipe may be written to."""
    return [FOLDER, Path()] if output is None else [output]


def _with_format(source: NewData, usual: str, asking: bool) -> NewData:
    """Add the format to a source: the usual format for a missing file, otherwise the user's answer."""
    if source.format is not None and not source.columns:
        return source
    if source.path == PLACEHOLDER and source.rows is None:
        return replace(source, format=usual)
    if source.columns and (source.unasked or not asking):
        raise source.refused()
    if not asking:
        _misused(f"give --format: the samples of {source.path} cannot be read from here")
    question = f"What does a sample of {source.path} contain?"
    held = source.format or ask.choice(question, get_args(DataFormat), "Format", usual)
    columns = source.columns
    return source.told(
        held,
        lambda name: ask.choice(
            f"Which column holds the {name}?", columns, "Column", name if name in columns else None
        ),
    )


def _write(recipe: Made, target: Path, github: bool, pre_commit: bool) -> None:
    """Write the recipe and its other files, and print what was written and the next commands."""
    folder, top = target.parent, hooks.root(target.parent)
    new: dict[Path, str] = {target: recipe.text}
    replaced: dict[Path, str] = {}
    left: list[Path] = []
    if not (folder / SCHEMA).exists():
        new[folder / SCHEMA] = schema()
    if github:
        workflow = as_typed(top / hooks.WORKFLOW)
        text = hooks.workflow(target, top)
        if not workflow.exists():
            new[workflow] = text
        elif _read(workflow) != text:
            left.append(workflow)
    if pre_commit:
        config = as_typed(top / hooks.PRE_COMMIT)
        present = _read(config) if config.exists() else None
        extended = hooks.pre_commit(target, top, present)
        if extended is not None:
            (new if present is None else replaced)[config] = extended
    written_files.write(new, replaced)
    show([item for item in recipe.diagnostics if item.severity != "note"])
    d = recipe.draft
    tell(f"{target}: {TITLES[d.method]} on {d.accelerator.name}, rows of {d.length:,} tokens")
    for path in [path for path in new if path != target]:
        tell(f"{path}: written")
    for path in replaced:
        tell(f"{path}: extended")
    for path in left:
        note(f"note: {path} exists with other content, and was not changed")
    for few in (item for item in recipe.diagnostics if item.code == N0527):
        note(f"note: {few.message}; {few.help}")
    if not d.sure:
        may = f"by calculation it may not fit {d.accelerator.name}"
        note(f"note: {may}: run `recipe plan` before you train")
    file = quote(str(target))
    note(f"next: `recipe plan {file}` shows memory, time and price; `recipe build {file}` writes the scripts")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ArtifactError(f"{path} is not UTF-8", "correct the file, or leave the option out") from None
