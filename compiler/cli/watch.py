"""`recipe watch`."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from recipec.compiler.cli.arguments.runs import WatchArguments
from recipec.compiler.cli.guard import DONE, FAILED
from recipec.compiler.terminal import color, on_ctrl_c
from recipec.compiler.watch import watch as watching


def watch(args: WatchArguments) -> None:
    """Run `recipe watch`."""
    on_ctrl_c(None)  # the run is not touched, and nothing is written
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # names may hold what its encoding has not
    console = Console(no_color=not color(sys.stdout), highlight=False, soft_wrap=False)
    runs = watching.Watch(args.folders, args.once, args.wait)
    if args.once:
        watching.watch_once(runs, args.json, console)
    elif args.json or not console.is_terminal or console.is_dumb_terminal:
        watching.watch_lines(runs, args.interval or runs.seconds, args.json)
    else:
        watching.watch_screen(runs, args.interval or runs.seconds, console)
    raise typer.Exit(DONE if all(run.well for run in runs.runs) else FAILED)
