"""What the commands of `recipe` share: their arguments, a recipe's checks, and how diagnostics are shown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer

from recipec.compiler.terminal import (
    color,
    console,
    doing,
    manner,
    note,
    on_ctrl_c,
    result,
    say,
    tell,
)
from recipec.spec.codes import Code

if TYPE_CHECKING:
    from recipec.compiler.lower import Lowered
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.pages.document import Document
    from recipec.spec.diagnostics import Diagnostic
    from recipec.spec.load import Loaded

__all__ = ["color", "console", "end_build", "note", "on_ctrl_c", "result", "say", "tell"]

DONE, FAILED, MISUSED = 0, 1, 2
"""Exit statuses."""


Format = Literal["text", "json"]
"""How diagnostics are shown."""
Recipe = Annotated[
    Path,
    typer.Argument(metavar="RECIPE", help="YAML file of a recipe."),
]
Recipes = Annotated[
    list[Path],
    typer.Argument(metavar="RECIPE", help="YAML files of recipes."),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Set a key to a YAML value; may be repeated."),
]
Shown = Annotated[
    Format, typer.Option("--format", help="Print diagnostics as text on stderr, or as JSON on stdout.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
DataDir = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="DIR", help="Folder of the data; by default the recipe's folder."),
]
Keep = Annotated[
    Path | None, typer.Option("--keep", metavar="DIR", help="Keep the files of the runs in this folder.")
]
Tokenizer = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="Folder of the model or of its tokenizer.")
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder of artifacts.")]


def group(help: str, **settings: Any) -> typer.Typer:
    """Create a command that has subcommands."""
    context = {"help_option_names": ["-h", "--help"]}
    return typer.Typer(help=help, rich_markup_mode=None, context_settings=context, **settings)


CHECK_SECONDS = 60.0
"""Most seconds for reading and checking one recipe; one or two are usual."""


def read(path: Path, sets: Sequence[str] | None, planning: bool = False) -> tuple[Loaded, Lowered]:
    """Load and lower a recipe.

    Args:
        planning: whether to accept features that only a plan supports.
    """
    from recipec.compiler.lower import lower
    from recipec.runtime.untrusted import TooLong, limit
    from recipec.spec.load import load

    try:
        with limit(CHECK_SECONDS):
            with doing(f"reading {path}"):
                loaded = load(path, sets or ())
            with doing(f"checking {path}"):
                lowered = lower(loaded, planning)
    except TooLong:
        loaded, lowered = _unending(path)
    return loaded, lowered


E0042 = Code(
    "E0042",
    "check takes too long",
    cause="The checks of a recipe are stopped after a minute. A regular expression such as `(a+)+b` "
    "can take almost forever. It may be in lora.targets, rank_pattern, sharding.rules or "
    "evaluate.prompts.",
    cure="Rewrite the expression without a repetition inside a repetition.",
)


def _unending(path: Path) -> tuple[Loaded, Lowered]:
    """Return the diagnostic about a recipe whose checks did not finish in time, and no program."""
    from recipec.compiler.lower import Lowered
    from recipec.spec.diagnostics import Diagnostic
    from recipec.spec.load import Loaded, display
    from recipec.spec.origins import Sources
    from recipec.spec.secrets import Concealer

    found = Diagnostic(
        E0042,
        f"the checks of {display(path)} did not finish within {CHECK_SECONDS:g} s",
        help="look for a regular expression with a repetition inside a repetition, such as (a+)+b",
    )
    return Loaded(path, None, [found], Sources(None, Concealer(None))), Lowered(None, [found])


def end_build(folder: Path) -> None:
    """Complete a build that was killed in a folder of artifacts, and print a note."""
    from recipec.compiler.artifacts.whole import finish

    if finish(folder):
        note(f"note: an interrupted build in {folder} was completed")


def complete_build(folder: Path) -> None:
    """Complete a killed build before its artifacts are read, or end the command if that is impossible."""
    from recipec.compiler.artifacts.whole import complete

    if complete(folder):
        note(f"note: an interrupted build in {folder} was completed")


def read_program(
    path: Path, sets: Sequence[str] | None, format: Format = "text", planning: bool = False
) -> tuple[Loaded, Lowered, Program]:
    """Load and lower a recipe, and end the command with its diagnostics if it has no program."""
    loaded, lowered = read(path, sets, planning)
    if lowered.program is None:
        fail(lowered.diagnostics, format)
    return loaded, lowered, lowered.program


def fail(diagnostics: Sequence[Diagnostic], format: Format = "text") -> NoReturn:
    """Print diagnostics, and end the command."""
    show(diagnostics, format)
    raise typer.Exit(FAILED)


def show(diagnostics: Sequence[Diagnostic], format: Format = "text") -> None:
    """Print diagnostics: as text on stderr, or as JSON on stdout.

    Text only counts the notes, unless --notes is set. A comment of the recipe may accept a warning or note.
    """
    from recipec.spec.diagnostics import accepted

    diagnostics = [item for item in diagnostics if not accepted(item)]
    if format == "json":
        from recipec.spec.diagnostics import json_text, render_json

        print(json_text(render_json(diagnostics)))
        return
    shown = [item for item in diagnostics if item.severity == "error" or not manner.quiet]
    if shown:
        from recipec.spec.diagnostics import render_text

        print(render_text(shown, color(sys.stderr), manner.notes), end="", file=sys.stderr)


def has_errors(diagnostics: Sequence[Diagnostic]) -> bool:
    return any(diagnostic.severity == "error" for diagnostic in diagnostics)


def print_document(document: Document, most: int | None = None) -> None:
    """Print a document on stdout as text, as `compiler.pages.text.show` does."""
    from recipec.compiler.pages import text

    text.show(document, most)
