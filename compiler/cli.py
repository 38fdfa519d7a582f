"""The command `recipe`. What a command needs is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from compiler import (
    cli_lsp,
    cli_new,
    cli_parity,
    cli_plan,
    cli_port,
    cli_report,
    cli_serve,
    cli_upgrade,
    cli_watch,
    completion,
)
from compiler.backends import Backend, findings, others
from compiler.cli_base import (
    DONE,
    FAILED,
    Format,
    Output,
    Recipe,
    Recipes,
    Sets,
    Shown,
    color,
    doing,
    has_errors,
    note,
    on_ctrl_c,
    read,
    result,
    say,
    show,
    tell,
)
from compiler.guard import guarded
from compiler.terminal import Commands

if TYPE_CHECKING:
    from compiler.lower import Lowered
    from spec.diagnostics import Diagnostic
    from spec.load import Loaded

app = typer.Typer(
    name="recipe",
    help="Compiles one YAML recipe into everything that fine-tunes and serves a model on TPUs.",
    no_args_is_help=True,
    cls=Commands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Split(str, Enum):  # noqa: UP042 (as Format)
    """The data of a recipe."""

    TRAIN = "train"
    EVAL = "eval"


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from compiler import __version__

        print(f"recipec {__version__}")
        raise typer.Exit(DONE)


@app.command()
def build(
    recipes: Recipes,
    output: Output = Path("generated"),
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; exit 1 and show a diff when something is stale.")
    ] = False,
    backend: Annotated[
        list[Backend] | None,
        typer.Option(
            "--backend",
            help="What else shall train it: trl writes baseline/, torchax train_torchax.py, tunix neither; "
            "may be repeated. By default what the artifact on disk was built for.",
            show_default=False,
        ),
    ] = None,
    sets: Sets = None,
    format: Shown = Format.TEXT,
) -> None:
    """Write the artifacts of recipes, or check that they are current."""
    pairs = _read_all(recipes, sets)
    programs = {item.program.name: item.program for _, item in pairs if item.program is not None}
    backends = {name: _backends(backend, output / name) for name in programs}
    diagnostics = [
        *(d for _, item in pairs for d in item.diagnostics),
        *(d for loaded, item in pairs for d in _of_backends(loaded, item, backends)),
        *_same_names(pairs),
    ]
    show(diagnostics, format)
    if has_errors(diagnostics):
        raise typer.Exit(FAILED)
    from compiler import artifact
    from compiler.emit import emit
    from runtime.progress import each

    artifacts = {}
    for name, program in each("making the artifacts", list(programs.items())):
        with doing(f"making {name}"):
            artifacts[name] = emit(program, backends[name])
    if check:
        difference = artifact.check(output, artifacts)
        if difference:
            result(difference, end="")
            again = " ".join(["recipe build", *map(str, recipes), *_as_options(output, sets, backend)])
            say(f"error: {output} is not what the recipes give; build it again: {again}")
            raise typer.Exit(FAILED)
        if format is Format.TEXT:
            tell(f"{output}: {_count(len(artifacts), 'artifact')} up to date")
        return
    on_ctrl_c(
        lambda: f"{output} is {'as it was' if artifact.check(output, artifacts) else 'whole and current'}"
    )
    with doing(f"writing {output}"):
        notes = artifact.write(output, artifacts)
    for line in notes:
        note(f"note: {line}")
    if format is Format.TEXT:
        for name, files in artifacts.items():
            tell(f"{output / name}: {_count(len(files), 'file')}")


@app.command()
def check(recipes: Recipes, sets: Sets = None, format: Shown = Format.TEXT) -> None:
    """Check recipes against the language, the model and the hardware."""
    pairs = _read_all(recipes, sets)
    diagnostics = [*(d for _, item in pairs for d in item.diagnostics), *_same_names(pairs)]
    show(diagnostics, format)
    if has_errors(diagnostics):
        raise typer.Exit(FAILED)
    if format is Format.TEXT:
        for path in recipes:
            tell(f"{path}: ok")


@app.command()
def explain(
    recipe: Recipe,
    path: Annotated[
        str | None,
        typer.Argument(
            metavar="PATH",
            help="A section or key, such as train.schedule.",
            show_default=False,
            autocompletion=completion.keys,
        ),
    ] = None,
    sets: Sets = None,
) -> None:
    """Show each value, where it comes from, and what it turns into."""
    from compiler.explain import explain as explained
    from compiler.explain import unknown_path

    loaded, lowered = read(recipe, sets)
    if path is not None:
        problem = unknown_path(path, loaded)
        if problem is not None:
            show([problem], Format.TEXT)
            raise typer.Exit(FAILED)
    if lowered.program is None:
        show(lowered.diagnostics, Format.TEXT)
        raise typer.Exit(FAILED)
    result(explained(lowered.program, loaded, path), end="")


@app.command()
def pack(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="An artifact's name.",
            show_default=False,
            autocompletion=completion.artifacts,
        ),
    ],
    folder: Annotated[
        Path, typer.Option("-d", "--from", metavar="DIR", help="The folder of artifacts.")
    ] = Path("generated"),
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The recipe it was built from; found by itself in recipes/.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The archive; NAME.tar.gz.", show_default=False),
    ] = None,
) -> None:
    """Make one archive of an artifact that runs by itself, with its local data."""
    from compiler.archive import pack as packed

    result(str(packed(name, folder, recipe, output)))


@app.command()
def diff(
    a: Recipe,
    b: Recipe,
    plan: Annotated[
        bool, typer.Option("--plan", help="Plan both: what changes in memory, time and cost.")
    ] = False,
    sets: Sets = None,
) -> None:
    """Show what changes from one recipe to another, in the run and in the artifact.

    --set applies to both.
    """
    from compiler.diff import diff as differences

    (_, before), (_, after) = read(a, sets, plan), read(b, sets, plan)
    if before.program is None or after.program is None:
        show([*before.diagnostics, *after.diagnostics], Format.TEXT)
        raise typer.Exit(FAILED)
    result(differences(before.program, after.program), end="")
    if plan:
        result(cli_plan.compare(before.program, after.program, tuple(sets or ())), end="")


app.command()(cli_new.new)
app.command()(cli_parity.parity)
app.command()(cli_plan.plan)
app.command()(cli_plan.cost)
app.command()(cli_port.port)
app.command()(cli_upgrade.upgrade)
app.command()(cli_report.report)
app.command()(cli_watch.watch)
app.command()(cli_lsp.lsp)
app.add_typer(cli_serve.app, name="serve")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the language."""
    import json

    from spec.schema import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def rehearse(
    recipe: Recipe,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=4, help="Optimizer steps to run.")] = 12,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="DIR", help="Keep what was run in this folder.", show_default=False),
    ] = None,
    sets: Sets = None,
) -> None:
    """Run the recipe's artifact in miniature on virtual CPU devices."""
    from compiler.rehearse import rehearse as rehearsed

    _, lowered = read(recipe, sets)
    show(lowered.diagnostics, Format.TEXT)
    if lowered.program is None:
        raise typer.Exit(FAILED)
    on_ctrl_c(None)  # it says by itself what is there
    raise typer.Exit(DONE if rehearsed(lowered.program, steps, keep).ok else FAILED)


@app.command()
def preview(
    recipe: Recipe,
    count: Annotated[int, typer.Option("-n", "--samples", metavar="N", min=0, help="Samples to show.")] = 3,
    split: Annotated[Split, typer.Option("--split", help="The data to look at.")] = Split.TRAIN,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="DIR", help="Folder of the model or of its tokenizer.", show_default=False
        ),
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir", metavar="DIR", help="Where the data lies; the recipe's folder.", show_default=False
        ),
    ] = None,
    sets: Sets = None,
    format: Annotated[Format, typer.Option("--format", help="Text or JSON, on stdout.")] = Format.TEXT,
) -> None:
    """Show samples with the tokens that carry loss, and what becomes of the data."""
    import json

    from compiler.preview import preview as previewed
    from compiler.preview import text
    from runtime.errors import UserError, report

    _, lowered = read(recipe, sets)
    if lowered.program is None:
        show(lowered.diagnostics, format)
        raise typer.Exit(FAILED)
    show([item for item in lowered.diagnostics if item.severity != "note"], Format.TEXT)
    try:
        made = previewed(lowered.program, count, split.value, model, data_dir)
    except UserError as error:
        report(error)
        raise typer.Exit(FAILED) from error
    if format is Format.JSON:
        print(json.dumps(made.to_dict(), indent=2))
    else:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # data may hold what the terminal has not
        print(text(made, color(sys.stdout)), end="")
    if made.problem:
        report(UserError(*made.problem))
        raise typer.Exit(FAILED)


def main() -> NoReturn:
    """The console script: whatever happens, the user reads sentences and gets an exit status."""
    guarded(lambda: app(prog_name="recipe", standalone_mode=False))


def _read_all(recipes: Sequence[Path], sets: Sequence[str] | None) -> list[tuple[Loaded, Lowered]]:
    """Recipes, loaded and lowered one after the other."""
    from runtime.progress import each

    return [read(path, sets) for path in each("checking", recipes)]


def _same_names(pairs: Sequence[tuple[Loaded, Lowered]]) -> list[Diagnostic]:
    """Two recipes of one name would write one folder."""
    from spec.diagnostics import Diagnostic
    from spec.load import display, locate

    out: list[Diagnostic] = []
    first: dict[str, Path] = {}
    for loaded, lowered in pairs:
        if lowered.program is None:
            continue
        name = lowered.program.name
        if name in first:
            message = f"{display(first[name])} is named `{name}` too: they would write one folder"
            found = Diagnostic("E0041", message, "name", "give one of them another name")
            out += locate([found], loaded.sources)
        first.setdefault(name, loaded.path)
    return out


def _backends(given: Sequence[Backend] | None, folder: Path) -> tuple[Backend, ...]:
    """The backends beside Tunix that an artifact is built for.

    Args:
        given: with --backend; None for those that the artifact on disk was built for.
        folder: of the artifact.
    """
    from compiler.artifact import backends_of

    return others(backends_of(folder) if given is None else [backend.value for backend in given])


def _of_backends(
    loaded: Loaded, lowered: Lowered, backends: Mapping[str, Sequence[Backend]]
) -> list[Diagnostic]:
    """What the backends of a recipe's artifact say about it."""
    from spec.load import locate

    program = lowered.program
    return locate(findings(program, backends[program.name]), loaded.sources) if program is not None else []


def _as_options(output: Path, sets: Sequence[str] | None, backends: Sequence[Backend] | None) -> list[str]:
    from shlex import quote

    chosen = [] if output == Path("generated") else ["-o", quote(str(output))]
    chosen += [word for backend in backends or () for word in ("--backend", backend.value)]
    return [*chosen, *(word for item in sets or () for word in ("--set", quote(item)))]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


if __name__ == "__main__":
    main()
