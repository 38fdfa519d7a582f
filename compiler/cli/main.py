"""The command `recipe`. What a command needs is imported when it runs, so that `--help` is quick."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
from typer.main import get_command_name
from typer.models import CommandInfo

from recipec.compiler.cli import build as cli_build
from recipec.compiler.cli import lsp as cli_lsp
from recipec.compiler.cli import models as cli_models
from recipec.compiler.cli import new as cli_new
from recipec.compiler.cli import parity as cli_parity
from recipec.compiler.cli import plan as cli_plan
from recipec.compiler.cli import report as cli_report
from recipec.compiler.cli import serve as cli_serve
from recipec.compiler.cli import sweep as cli_sweep
from recipec.compiler.cli import trained as cli_trained
from recipec.compiler.cli import watch as cli_watch
from recipec.compiler.cli.base import (
    DONE,
    FAILED,
    AsJson,
    DataDir,
    Format,
    Keep,
    Recipe,
    Sets,
    Tokenizer,
    color,
    complete_build,
    fail,
    on_ctrl_c,
    print_document,
    read,
    read_program,
    result,
    show,
)
from recipec.compiler.cli.guard import guarded
from recipec.compiler.cli.plugins import AllCommands, plugins

app = typer.Typer(
    name="recipe",
    help="Compile one YAML recipe into a folder that fine-tunes and serves a model on TPUs.",
    no_args_is_help=True,
    cls=AllCommands,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def root(
    version: Annotated[bool, typer.Option("--version", help="Show the version and exit.")] = False,
) -> None:
    if version:
        from recipec.compiler import __version__

        print(f"recipec {__version__}")
        raise typer.Exit(DONE)


app.command()(cli_build.build)
app.command()(cli_build.check)


@app.command()
def explain(
    recipe: Recipe,
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="A section or key, such as train.schedule."),
    ] = None,
    sets: Sets = None,
) -> None:
    """Show each value, where it comes from, and what it turns into."""
    from recipec.compiler.explain.explain import explain as explained
    from recipec.compiler.explain.explain import unknown_path

    loaded, lowered = read(recipe, sets)
    problem = None if path is None else unknown_path(path, loaded)
    if problem is not None or lowered.program is None:
        fail(lowered.diagnostics if problem is None else [problem])
    print_document(explained(lowered.program, loaded, path))


@app.command()
def card(
    recipe: Recipe,
    as_json: AsJson = False,
    sets: Sets = None,
) -> None:
    """Show what was verified for a recipe: how, when, and with which versions."""
    import json

    from recipec.compiler import card as cards

    program = read_program(recipe, sets)[2]
    if as_json:
        print(json.dumps(cards.as_json(program), indent=2))
    else:
        print_document(cards.document(program))


@app.command()
def pack(
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of an artifact."),
    ],
    folder: Annotated[
        Path, typer.Option("-d", "--from", metavar="DIR", help="The folder of artifacts.")
    ] = Path("generated"),
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The recipe of the artifact; by default it is found in recipes/.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The archive; by default NAME.tar.gz."),
    ] = None,
) -> None:
    """Pack an artifact and its local data into one archive that runs by itself."""
    from recipec.compiler.pack import pack as packed

    complete_build(folder)
    result(str(packed(name, folder, recipe, output)))


@app.command()
def diff(
    a: Recipe,
    b: Recipe,
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Plan both recipes, and show what changes in memory, time and cost."),
    ] = False,
    artifact: Annotated[
        bool,
        typer.Option("--artifact", help="Show the changed lines of the artifact's files."),
    ] = False,
    sets: Sets = None,
) -> None:
    """Show what differs between two recipes, in the run and in the artifact.

    --set applies to both recipes. If both are the same file, it applies only to the second.
    """
    from recipec.compiler.explain.diff import diff as differences

    asked = tuple(sets or ())
    own = () if a.resolve() == b.resolve() else asked  # else there would be nothing to compare
    (_, before), (_, after) = read(a, list(own), plan), read(b, list(asked), plan)
    if before.program is None or after.program is None:
        fail([*before.diagnostics, *after.diagnostics])
    result(differences(before.program, after.program, artifact), end="")
    if plan:
        from recipec.compiler.plan.plan_text import WIDTH

        result("")
        print_document(cli_plan.compare((before.program, own), (after.program, asked)), WIDTH)


for command in (
    *(cli_new.new, cli_parity.parity, cli_plan.plan, cli_plan.calibrate, cli_plan.cost),
    *(cli_report.report, cli_sweep.sweep, cli_watch.watch, cli_lsp.lsp, cli_trained.chat, cli_trained.push),
):
    app.command()(command)
app.add_typer(cli_trained.app, name="adapters")
app.add_typer(cli_models.app, name="models")
app.add_typer(cli_serve.app, name="serve")


@app.command()
def schema() -> None:
    """Print the JSON Schema of the language."""
    import json

    from recipec.spec.schema import json_schema

    print(json.dumps(json_schema(), indent=2, ensure_ascii=False))


@app.command()
def rehearse(
    recipe: Recipe,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=4, help="Optimizer steps to run.")] = 12,
    keep: Keep = None,
    sets: Sets = None,
) -> None:
    """Run the recipe's artifact in miniature on virtual CPU devices."""
    from recipec.compiler.rehearse.rehearse import rehearse as rehearsed

    _, lowered, program = read_program(recipe, sets)
    show(lowered.diagnostics)
    on_ctrl_c(None)  # it says by itself what is there
    raise typer.Exit(DONE if rehearsed(program, steps, keep).ok else FAILED)


@app.command()
def preview(
    recipe: Recipe,
    count: Annotated[int, typer.Option("-n", "--samples", metavar="N", min=0, help="Samples to show.")] = 3,
    split: Annotated[
        Literal["train", "eval"], typer.Option("--split", help="The part of the data to show.")
    ] = "train",
    model: Tokenizer = None,
    data_dir: DataDir = None,
    sets: Sets = None,
    format: Annotated[Format, typer.Option("--format", help="Text or JSON, on stdout.")] = "text",
) -> None:
    """Show samples, the tokens that carry loss, and statistics of the data."""
    import json

    from recipec.compiler.explain.preview import preview as previewed
    from recipec.compiler.explain.preview import text
    from recipec.runtime.errors import UserError, report

    _, lowered, program = read_program(recipe, sets, format)
    show(lowered.diagnostics)
    try:
        made = previewed(program, count, split, model, data_dir)
    except UserError as error:
        report(error)
        raise typer.Exit(FAILED) from error
    if format == "json":
        print(json.dumps(made.to_dict(), indent=2))
    else:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # data may hold what the terminal has not
        print(text(made, color(sys.stdout)), end="")
    if made.problem:
        report(UserError(*made.problem))
        raise typer.Exit(FAILED)


def main() -> NoReturn:
    """Run the console script. It ends with an exit status, and prints errors as sentences."""
    guarded(lambda: _with_command(sys.argv[1:2])(prog_name="recipe", standalone_mode=False))


def _with_command(first: list[str]) -> typer.Typer:
    """Return the application with only the requested command, because typer creates all commands before it
    runs one. Return all of it if the first argument is no command."""
    part = copy.copy(app)
    part.registered_commands = [command for command in app.registered_commands if _name(command) in first]
    part.registered_groups = [group for group in app.registered_groups if group.name in first]
    known = part.registered_commands or part.registered_groups
    return part if known or plugins().keys() & {*first} else app


def _name(command: CommandInfo) -> str | None:
    return command.name or (command.callback and get_command_name(command.callback.__name__))


if __name__ == "__main__":
    main()
