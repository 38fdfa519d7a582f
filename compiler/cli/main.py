"""The command `recipe`."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from recipec.compiler import __version__
from recipec.compiler.cli.guard import DONE, guarded
from recipec.compiler.cli.parser import AllCommands

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
        print(f"recipec {__version__}")
        raise typer.Exit(DONE)


def main() -> NoReturn:
    """Run the console script. It ends with an exit status, and prints errors as sentences."""
    guarded(lambda: app(prog_name="recipe", standalone_mode=False))


if __name__ == "__main__":
    main()
