"""The arguments of commands that run something, and of those on runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli.arguments.shared_arguments import AsJson, Keep, Recipe, Sets
from recipec.compiler.lowering.backend import Backend


@dataclass(frozen=True)
class RehearseArguments:
    """Run the recipe's artifact in miniature on virtual CPU devices."""

    recipe: Recipe
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=4, help="Optimizer steps to run.")] = 12
    keep: Keep = None
    sets: Sets = None


@dataclass(frozen=True)
class ParityArguments:
    """Train the recipe in miniature with each backend, and compare the results.

    Exits with 1 if two backends differ by more than the limits.
    """

    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RECIPE", help="YAML file of a recipe; with --compare, traces."),
    ]
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare traces (.npz) that the scripts wrote with --trace.")
    ] = False
    backends: Annotated[
        list[Backend] | None,
        typer.Option("--backend", help="A backend to compare; may be repeated. By default all."),
    ] = None
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to run.")] = 20
    keep: Keep = None
    tolerances: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            metavar="QUANTITY=X",
            help="Another limit for initial, gradients, losses, trained or merged; may be repeated.",
        ),
    ] = None
    as_json: AsJson = False
    sets: Sets = None


@dataclass(frozen=True)
class SweepArguments:
    """Train a recipe with several values of some keys, and compare the runs.

    The runs are trained one after the other. If the command stops, run it again to continue: completed runs
    are skipped, and a stopped run is resumed.
    """

    recipe: Recipe
    over: Annotated[
        list[str],
        typer.Option(
            "--over",
            metavar="PATH=[VALUE, ...]",
            help="A key and its values; may be repeated. All combinations are run.",
        ),
    ]
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="DIR", help="Passed to train.py as --model."),
    ] = None
    data_dir: Annotated[
        Path | None,
        typer.Option(
            "--data-dir",
            metavar="DIR",
            help="Passed to train.py as --data-dir; by default the recipe's folder.",
        ),
    ] = None
    launch: Annotated[
        str | None,
        typer.Option(
            "--launch",
            metavar="COMMAND",
            help="Command that starts a run in its artifact's folder, instead of train.py on this machine, "
            "such as 'sky jobs launch -y launch/skypilot.yaml'.",
        ),
    ] = None
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="The folder of the runs' artifacts.")
    ] = Path("sweep")
    sets: Sets = None


@dataclass(frozen=True)
class ReportArguments:
    """Write one HTML page of a run or of a serving sweep.

    The page needs no network. Folders may be addresses, such as gs://bucket/run.
    """

    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR",
            help="The folder of a run's checkpoints, a folder that contains such folders, or the results of "
            "a sweep; further ones are compared with it.",
        ),
    ]
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="RUN", help="Another run to compare with it."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The page; by default NAME-report.html."),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Output of `recipe plan --json`; by default the plan in recipec's cache.",
        ),
    ] = None
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe", metavar="FILE", help="The run's recipe, to show where its values come from."
        ),
    ] = None
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--results",
            metavar="PATH",
            help="A merged folder, results of bench.sh or eval.sh, or JSON from `recipe serve verify`.",
        ),
    ] = None
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False


@dataclass(frozen=True)
class WatchArguments:
    """Follow runs: step, losses, speed, memory, checkpoints and problems.

    It only reads the files that a run writes. It ends when each run is done or failed: with status 0 if all
    completed, and with 1 if one did not. It waits for a run that was killed or stopped, until --resume
    continues it.
    """

    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR",
            help="Folders of checkpoints, local or at gs:// addresses, or folders that contain such folders.",
        ),
    ]
    once: Annotated[bool, typer.Option("--once", help="Show the current state, and exit.")] = False
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            help="Seconds between two updates; by default 2, or 15 at an address.",
        ),
    ] = None
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Wait for --resume of a run that was killed or stopped, or end with it."
        ),
    ] = True
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object a line, or one list with --once.")
    ] = False
