"""`recipe new`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal, NoReturn, get_args

import typer

from recipec.compiler.cli.base import MISUSED, note, say, show, tell
from recipec.compiler.wording import as_typed, listing

if TYPE_CHECKING:
    from recipec.compiler.new.data_source import NewData
    from recipec.compiler.new.draft import Probe
    from recipec.compiler.new.new_recipe import Made

FOLDER = Path("recipes")
"""Where recipes lie, unless their data lies elsewhere."""


DataFormat = Literal["chat", "instruction", "prompt_completion", "text", "preference", "unpaired_preference"]
"""What a sample holds, as data.format."""


def new(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the recipe and of its artifact."),
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="ID", help="A Hugging Face id, or a directory with a checkpoint."),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            metavar="NAME",
            help="The machine that trains, such as v6e-8; v6e alone is the cheapest that fits.",
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="A file of samples, or hf://OWNER/NAME; may be repeated. Without it the recipe names "
            "data/train.jsonl, which you add later.",
        ),
    ] = None,
    format: Annotated[
        DataFormat | None,
        typer.Option("--format", help="What a sample contains; by default read from a local file."),
    ] = None,
    method: Annotated[
        Literal["lora", "qlora", "dpo", "kto", "full"] | None,
        typer.Option(
            "--method",
            help="By default lora, qlora if lora does not fit, and dpo or kto for preference data.",
        ),
    ] = None,
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="NAME", help="The TPU that serves the model with vLLM, or none."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The recipe's folder; by default recipes, or this folder if it contains the data. Data "
            "outside of it gets a link in its data folder.",
        ),
    ] = None,
    github: Annotated[
        bool, typer.Option("--github", help="Write a GitHub Actions workflow that checks the recipes.")
    ] = False,
    pre_commit: Annotated[
        bool, typer.Option("--pre-commit", help="Make pre-commit check the recipes before each commit.")
    ] = False,
) -> None:
    """Write a commented recipe for a model and a machine.

    On a terminal it asks for missing values. It replaces no existing file.
    """
    from recipec.compiler.catalog import is_directory
    from recipec.compiler.new import ask, hooks, new_recipe
    from recipec.compiler.new.data_source import as_turns, combined, placed
    from recipec.compiler.new.fetched_models import NewModels, completed
    from recipec.compiler.new.machines import generation_of, named, of_generation
    from recipec.compiler.new.written_files import linked

    asking = ask.possible()
    _demand(asking, model, accelerator)
    if refused := new_recipe.refusal_of_name(name):
        raise typer.BadParameter(refused, param_hint="NAME")
    source = None
    if data:
        source = combined([_source(path, format) for path in data])
    elif not asking:
        source = _source(None, format)
    if source is not None:
        _target(name, output, source)  # before anything is asked
    from tempfile import TemporaryDirectory

    with TemporaryDirectory() as scratch:
        models = NewModels(Path(scratch), _folders(output))

        def look(text: str) -> Probe:
            spelled = new_recipe.spelled(text, Path())
            folder = Path() if is_directory(spelled) else models.folder(spelled)
            return new_recipe.look(name, spelled, method, folder / f"{name}.yaml")

        if model is None:
            model = ask.model(look)
        elif (whole := completed(model)) != model:
            note(f"note: {model} is {whole}")
            model = whole
        if accelerator is None:
            machine = ask.accelerator(look(model), method)
        elif (generation := generation_of(accelerator)) is not None:
            machine = of_generation(look(model), generation, method)
        else:
            machine = named(accelerator)
        source = source or ask.data(lambda text: _source(text, format))
        target = _target(name, output, source)
        spelled = new_recipe.spelled(model, target.parent)
        if brought := models.settle(spelled, target.parent):
            tell(brought)
    usual = new_recipe.usual_format(spelled, method, target)
    turned = source.parts if usual == "text" else tuple(as_turns(part) for part in source.parts)
    first, *others = (_with_format(part, usual, asking) for part in turned)
    source = replace(source, format=first.format, fields=first.fields, others=tuple(others))
    server = ask.serve() if serve is None and asking else ask.server(serve or ask.NO_SERVER)
    if asking and not (github or pre_commit) and (hooks.root(target.parent) / ".git").exists():
        github = ask.confirm("Should GitHub Actions check the recipes at each push?")
        pre_commit = ask.confirm("Should pre-commit check them before each commit?")
    for part in source.parts:
        if columns := part.columns_read():
            tell(f"{part.path}: {columns}")
    source, links = placed(source, target.parent)
    asked = new_recipe.NewRecipeOptions(name, spelled, machine, method, source, server, target)
    with linked(links):
        _write(new_recipe.make(asked), target, github, pre_commit)
    for path, place in links.items():
        tell(f"{path}: a link to {place}; on another machine, put the data there")
    if links:
        note("note: `recipe check` does not read samples behind a link; `recipe preview` does")


def _demand(asking: bool, model: str | None, accelerator: str | None) -> None:
    """Refuse missing values that only the user knows, if the command cannot ask."""
    missing = [flag for flag, given in (("--model", model), ("--accelerator", accelerator)) if given is None]
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
    from recipec.compiler.errors import ArtifactError
    from recipec.compiler.new.data_source import PLACEHOLDER, NewData, look

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
    from recipec.compiler.new.written_files import refuse_existing

    target = _folder(output, source) / f"{name}.yaml"
    refuse_existing(target, "choose another name, or another folder with -o")
    return target


def _folder(output: Path | None, source: NewData) -> Path:
    """Return the folder that contains most of the data's files; the first of equal ones."""
    from recipec.compiler.new.data_source import is_within

    local = [Path(part.path) for part in source.parts if "://" not in part.path]
    local = [path for path in local if path.exists()]
    return max(_folders(output), key=lambda folder: sum(is_within(path, folder) for path in local))


def _folders(output: Path | None) -> list[Path]:
    """Return the folders that a recipe may be written to."""
    return [FOLDER, Path()] if output is None else [output]


def _with_format(source: NewData, usual: str, asking: bool) -> NewData:
    """Add the format to a source: the usual format for a missing file, otherwise the user's answer."""
    from recipec.compiler.new import ask
    from recipec.compiler.new.data_source import PLACEHOLDER

    if source.format is not None and not source.columns:
        return source
    if source.path == PLACEHOLDER and source.rows is None:
        return replace(source, format=usual)
    if not asking and source.columns:
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


def _write(made: Made, target: Path, github: bool, pre_commit: bool) -> None:
    """Write the recipe and its other files, and print what was written and the next commands."""
    from recipec.compiler.artifacts.artifact import SCHEMA
    from recipec.compiler.checks.train import N0527
    from recipec.compiler.new import hooks, written_files
    from recipec.compiler.new.machines import TITLES
    from recipec.spec.schema import text as schema

    folder, top = target.parent, hooks.root(target.parent)
    new: dict[Path, str] = {target: made.text}
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
    show([item for item in made.diagnostics if item.severity != "note"])
    d = made.draft
    tell(f"{target}: {TITLES[d.method]} on {d.accelerator.name}, rows of {d.length:,} tokens")
    for path in [path for path in new if path != target]:
        tell(f"{path}: written")
    for path in replaced:
        tell(f"{path}: extended")
    for path in left:
        note(f"note: {path} exists with other content, and was not changed")
    for few in (item for item in made.diagnostics if item.code == N0527):
        note(f"note: {few.message}; {few.help}")
    if not d.sure:
        may = f"by calculation it may not fit {d.accelerator.name}"
        note(f"note: {may}: run `recipe plan` before you train")
    file = quote(str(target))
    note(f"next: `recipe plan {file}` shows memory, time and price; `recipe build {file}` writes the scripts")


def _read(path: Path) -> str:
    from recipec.compiler.errors import ArtifactError

    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ArtifactError(f"{path} is not UTF-8", "correct the file, or leave the option out") from None
