"""How commands print diagnostics, and end with them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

import typer

from recipec.compiler.cli.arguments.shared_arguments import Format
from recipec.compiler.cli.guard import FAILED
from recipec.compiler.terminal import color, manner
from recipec.spec.diagnostics import Diagnostic, accepted, json_text, render_json, render_text


def fail(diagnostics: Sequence[Diagnostic], format: Format = "text") -> NoReturn:
    """Print diagnostics, and end the command."""
    show(diagnostics, format)
    raise typer.Exit(FAILED)


def show(diagnostics: Sequence[Diagnostic], format: Format = "text") -> None:
    """Print diagnostics: as text on stderr, or as JSON on stdout.

    Text only counts the notes, unless --notes is set. A comment of the recipe may accept a warning or note.
    """
    diagnostics = [item for item in diagnostics if not accepted(item)]
    if format == "json":
        print(json_text(render_json(diagnostics)))
        return
    shown = [item for item in diagnostics if item.severity == "error" or not manner.quiet]
    if shown:
        print(render_text(shown, color(sys.stderr), manner.notes), end="", file=sys.stderr)


def has_errors(diagnostics: Sequence[Diagnostic]) -> bool:
    return any(diagnostic.severity == "error" for diagnostic in diagnostics)
