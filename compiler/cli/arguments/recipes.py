"""The arguments of commands on recipes that do not plan or run anything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from recipec.compiler.cli.arguments.shared_arguments import (
    AsJson,
    DataDir,
    Format,
    Output,
    Recipe,
    Recipes,
    Sets,
    Shown,
    Tokenizer,
)
from recipec.compiler.lowering.backend import Backend

RUNTIMES = ("wheel", "source")
"""What a build writes next to the artifacts for them to run on."""


def _runtime(value: str | None) -> str | None:
    """Refuse an unknown --runtime, and that of an earlier version with today's spelling."""
    if value == "copy":
        raise typer.BadParameter("`copy` copied some modules until 0.2; --runtime source copies all of them")
    if value is not None and value not in RUNTIMES:
        raise typer.BadParameter(f"{value!r} is not one of {', '.join(map(repr, RUNTIMES))}.")
    return value


@dataclass(frozen=True)
class BuildArguments:
    """Write the artifacts of recipes, or check that they are up to date."""

    recipes: Recipes
    output: Output = Path("generated")
    check: Annotated[
        bool,
        typer.Option("--check", help="Write nothing. Exit with 1 and show a diff if an artifact is stale."),
    ] = False
    backend: Annotated[
        list[Backend] | None,
        typer.Option(
            "--backend",
            help="Another backend to build for: trl writes baseline/, torchax writes train_torchax.py, tunix "
            "writes neither; may be repeated. By default the backends of the artifact on disk.",
        ),
    ] = None
    prune: Annotated[
        bool,
        typer.Option(
            "--prune",
            help="Also remove the artifacts of renamed or removed recipes. With --check, fail if there are "
            "any.",
        ),
    ] = False
    force: Annotated[
        bool,
        typer.Option("--force", help="Also replace files that no build wrote; a copy of each is kept."),
    ] = False
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
    ] = None
    notebook: Annotated[
        bool | None,
        typer.Option(
            "--notebook/--no-notebook",
            help="Also write a notebook, for Colab (v5e-1, v6e-1), Kaggle (v5e-8) or a CPU. By default the "
            "choice of the artifact on disk.",
        ),
    ] = None
    sets: Sets = None
    format: Shown = "text"


@dataclass(frozen=True)
class CheckArguments:
    """Check recipes against the language, the model and the hardware."""

    recipes: Recipes
    sets: Sets = None
    format: Shown = "text"


@dataclass(frozen=True)
class ExplainArguments:
    """Show each value, where it comes from, and what it turns into."""

    recipe: Recipe
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH", help="A section or key, such as train.schedule."),
    ] = None
    sets: Sets = None


@dataclass(frozen=True)
class CardArguments:
    """Show what was verified for a recipe: how, when, and with which versions."""

    recipe: Recipe
    as_json: AsJson = False
    sets: Sets = None


@dataclass(frozen=True)
class DiffArguments:
    """Show what differs between two recipes, in the run and in the artifact.

    --set applies to both recipes. If both are the same file, it applies only to the second.
    """

    a: Recipe
    b: Recipe
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Plan both recipes, and show what changes in memory, time and cost."),
    ] = False
    artifact: Annotated[
        bool,
        typer.Option("--artifact", help="Show the changed lines of the artifact's files."),
    ] = False
    sets: Sets = None


@dataclass(frozen=True)
class PreviewArguments:
    """Show samples, the tokens that carry loss, and statistics of the data."""

    recipe: Recipe
    count: Annotated[int, typer.Option("-n", "--samples", metavar="N", min=0, help="Samples to show.")] = 3
    split: Annotated[
        Literal["train", "eval"], typer.Option("--split", help="The part of the data to show.")
    ] = "train"
    model: Tokenizer = None
    data_dir: DataDir = None
    completions: Annotated[
        str | None,
        typer.Option(
            "--completions",
            metavar="COLUMN|FILE",
            help="Score completions with the recipe's rewards: those in a column of its prompts, or in a "
            "file whose rows also have a column completion or completions.",
        ),
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(
            "--html",
            metavar="FILE",
            help="Also write a page with the samples, and with their pictures as the model sees them.",
        ),
    ] = None
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample",
            min=1,
            metavar="N",
            help="Let the model, in the folder of --model with its weights, complete the first N prompts as "
            "training would, and score these completions.",
        ),
    ] = None
    sets: Sets = None
    format: Annotated[Format, typer.Option("--format", help="Text or JSON, on stdout.")] = "text"


@dataclass(frozen=True)
class PackArguments:
    """Pack an artifact and its local data into one archive that runs by itself."""

    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of an artifact."),
    ]
    folder: Annotated[Path, typer.Option("-d", "--from", metavar="DIR", help="The folder of artifacts.")] = (
        Path("generated")
    )
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The recipe of the artifact; by default it is found in recipes/.",
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The archive; by default NAME.tar.gz."),
    ] = None
