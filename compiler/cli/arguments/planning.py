"""The arguments of `recipe plan`, `recipe cost` and `recipe calibrate`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli.arguments.shared_arguments import AsJson, DataDir, Recipe, Sets, Tokenizer
from recipec.compiler.lowering.backend import Backend

Step = Annotated[
    Backend, typer.Option("--backend", help="The step to compile: train.py's, or train_torchax.py's.")
]


@dataclass(frozen=True)
class PlanArguments:
    """Compile the training step for its TPU: memory, time, collectives, cost.

    No TPU is needed. Exits with 1 if the step does not fit, or exceeds the recipe's budget.
    """

    recipe: Recipe
    backend: Step = Backend.TUNIX
    exact: Annotated[bool, typer.Option("--exact", help="Compile all layers completely.")] = False
    search: Annotated[
        bool, typer.Option("--search", help="Search for better meshes, micro-batches, remat and attention.")
    ] = False
    most: Annotated[
        int,
        typer.Option("--most", metavar="N", min=1, help="Number of configurations that a search compiles."),
    ] = 24
    free_batch: Annotated[
        bool, typer.Option("--free-batch", help="Allow a search to use more rows in an optimizer step.")
    ] = False
    serve: Annotated[
        bool, typer.Option("--serve", help="Also compile the server's step, in a separate environment.")
    ] = False
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write one page with charts."),
    ] = None
    as_json: AsJson = False
    model: Tokenizer = None
    data_dir: DataDir = None
    sets: Sets = None


@dataclass(frozen=True)
class CalibrateArguments:
    """Compare the step times of probes with their plans, and use them in later plans."""

    probes: Annotated[
        list[Path],
        typer.Argument(metavar="PROBE...", help="probe.json files of machines."),
    ]
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The recipe that was probed; by default recipe.yaml next to each file.",
        ),
    ] = None


@dataclass(frozen=True)
class CostArguments:
    """Show what training and serving cost, for given, measured or planned hours.

    Without --train-hours and --run the training is planned, as with `recipe plan`.
    """

    recipe: Recipe
    hours: Annotated[
        float | None,
        typer.Option(
            "--serve-hours",
            "--hours",
            metavar="H",
            help="Hours that the server runs, in addition to 1 and 24; for the training see --train-hours.",
        ),
    ] = None
    train_hours: Annotated[
        float | None,
        typer.Option("--train-hours", metavar="H", help="Hours that the training takes."),
    ] = None
    run: Annotated[
        Path | None,
        typer.Option("--run", metavar="DIR", help="Folder of a run; use its measured hours."),
    ] = None
    as_json: AsJson = False
    backend: Step = Backend.TUNIX
    model: Tokenizer = None
    data_dir: DataDir = None
    sets: Sets = None
