"""`recipe watch`."""

from __future__ import annotations

from typing import Annotated

import typer

from recipec.compiler.cli.base import DONE, FAILED, color, on_ctrl_c


def watch(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR",
            help="Folders of checkpoints, local or at gs:// addresses, or folders that contain such folders.",
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show the current state, and exit.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            help="Seconds between two updates; by default 2, or 15 at an address.",
        ),
    ] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Wait for --resume of a run that was killed or stopped, or end with it."
        ),
    ] = True,
    json: Annotated[
        bool, typer.Option("--json", help="Print JSON: one object a line, or one list with --once.")
    ] = False,
) -> None:
    """Follow runs: step, losses, speed, memory, checkpoints and problems.

    It only reads the files that a run writes. It ends when each run is done or failed: with status 0 if all
    completed, and with 1 if one did not. It waits for a run that was killed or stopped, until --resume
    continues it.
    """
    import sys

    from rich.console import Console

    from recipec.compiler.watch import watch as watching

    on_ctrl_c(None)  # the run is not touched, and nothing is written
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what its encoding has not
    console = Console(no_color=not color(sys.stdout), highlight=False, soft_wrap=False)
    runs = watching.Watch(folders, once, wait)
    if once:
        watching.watch_once(runs, json, console)
    elif json or not console.is_terminal or console.is_dumb_terminal:
        watching.watch_lines(runs, interval or runs.seconds, json)
    else:
        watching.watch_screen(runs, interval or runs.seconds, console)
    raise typer.Exit(DONE if all(run.well for run in runs.runs) else FAILED)
