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
            help="Folders of checkpoints, here or at gs:// addresses, or folders that hold some.",
            show_default=False,
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Show how they stand, and exit.")] = False,
    interval: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            help="Between two looks; 2, at an address 15.",
            show_default=False,
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="JSON: an object a line, with --once a list of them.")
    ] = False,
) -> None:
    """Show runs as they go: step, losses, speed, memory, checkpoints, and what looks wrong.

    It reads what a run writes and touches nothing. It ends when the runs have ended: with status 0 when they
    did what was asked of them, 1 when one failed or was stopped.
    """
    import sys

    from rich.console import Console

    from recipec.compiler.watch import screen

    on_ctrl_c(None)  # the run is not touched, and nothing is written
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what its encoding has not
    console = Console(no_color=not color(sys.stdout), highlight=False, soft_wrap=False)
    runs = screen.Watch(folders)
    if once:
        well = screen.watch_once(runs, json, console)
    elif json or not console.is_terminal or console.is_dumb_terminal:
        well = screen.watch_lines(runs, interval or runs.seconds, json)
    else:
        well = screen.watch_screen(runs, interval or runs.seconds, console)
    raise typer.Exit(DONE if well else FAILED)
