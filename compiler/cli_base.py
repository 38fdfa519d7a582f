"""What the commands of `recipe` share: their arguments, a recipe's checks, and how findings are shown."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from compiler.lower import Lowered
    from spec.diagnostics import Diagnostic
    from spec.load import Loaded

DONE, FAILED, MISUSED = 0, 1, 2
"""Exit statuses."""


class Format(str, Enum):  # noqa: UP042 (typer shows the values of a str enum)
    """How diagnostics are shown."""

    TEXT = "text"
    JSON = "json"


Recipe = Annotated[Path, typer.Argument(metavar="RECIPE", help="A recipe's YAML file.", show_default=False)]
Recipes = Annotated[
    list[Path], typer.Argument(metavar="RECIPE", help="Recipes' YAML files.", show_default=False)
]
Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Set a key to a YAML value; may be repeated.", show_default=False
    ),
]
Shown = Annotated[
    Format, typer.Option("--format", help="Diagnostics as text on stderr, or as JSON on stdout.")
]
Output = Annotated[Path, typer.Option("-o", "--output", metavar="DIR", help="The folder of artifacts.")]


def read(path: Path, sets: Sequence[str] | None, planning: bool = False) -> tuple[Loaded, Lowered]:
    """A recipe, loaded and lowered.

    Args:
        planning: whether what only a plan can do is let through.
    """
    from compiler.lower import lower
    from spec.load import load

    loaded = load(path, sets or ())
    return loaded, lower(loaded, planning)


def show(diagnostics: Sequence[Diagnostic], format: Format) -> None:
    """Prints findings: as text on stderr, or as JSON on stdout."""
    if format is Format.JSON:
        import json

        from spec.diagnostics import render_json

        print(json.dumps(render_json(diagnostics), indent=2, ensure_ascii=False))
    elif diagnostics:
        from spec.diagnostics import render_text

        print(render_text(diagnostics, color=color(sys.stderr)), end="", file=sys.stderr)


def has_errors(diagnostics: Sequence[Diagnostic]) -> bool:
    return any(diagnostic.severity == "error" for diagnostic in diagnostics)


def color(stream: Any) -> bool:
    """Whether a stream is a terminal that takes colors, as https://no-color.org has it."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: str) -> None:
    print(text, file=sys.stderr)
