"""The commands `recipe serve`: a server in a container, and what is asked of it."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from compiler import completion
from compiler.cli_base import note, say
from compiler.serving import bench, verify

app = typer.Typer(
    help="Run an artifact's server, measure it and compare its answers.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Artifact = Annotated[
    Path,
    typer.Argument(
        metavar="ARTIFACT",
        help="An artifact's folder: generated/NAME.",
        show_default=False,
        autocompletion=completion.artifact_folders,
    ),
]


@app.command()
def up(
    artifact: Artifact,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="DIR", help="Folder of the weights on this machine.", show_default=False
        ),
    ] = None,
    adapter: Annotated[
        Path | None,
        typer.Option("--adapter", metavar="DIR", help="Folder of the PEFT adapter.", show_default=False),
    ] = None,
    base_image: Annotated[
        str | None,
        typer.Option(
            "--base-image", metavar="IMAGE", help="Instead of the recipe's serve.image.", show_default=False
        ),
    ] = None,
    detach: Annotated[bool, typer.Option("--detach", help="Return once the server is ready.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            "--wait",
            metavar="MINUTES",
            min=0.01,
            help="How long it may load and compile; 30.",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory",
            metavar="SIZE",
            help="Limit of the container's memory, such as 64g.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Build the image, start the server and wait until it answers.

    It runs until Ctrl-C, which stops and removes the container; with --detach until `recipe serve down`.
    """
    from compiler.serving.artifacts import open_artifact
    from compiler.serving.up import Options
    from compiler.serving.up import up as started

    options = Options(model, adapter, base_image, detach, wait, memory)
    _interruptible(lambda: started(open_artifact(artifact), options, _note))


@app.command()
def down(
    artifact: Artifact,
    volumes: Annotated[
        bool, typer.Option("--volumes", help="Remove the compiled programs and downloads, too.")
    ] = False,
) -> None:
    """Stop the server, whose requests in flight may finish, and remove its container."""
    from compiler.serving.artifacts import open_artifact
    from compiler.serving.down import down as stopped

    _interruptible(lambda: stopped(open_artifact(artifact), volumes, _note))


app.command("bench")(bench.command)
app.command("verify")(verify.command)


def _interruptible(run: Callable[[], None]) -> None:
    from compiler.serving.events import Interrupted

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a log may hold what the terminal has not
    try:
        run()
    except Interrupted as interrupted:
        with suppress(OSError):
            say(f"interrupted by {signal.Signals(interrupted.signum).name}")
        raise typer.Exit(128 + interrupted.signum) from None


def _note(text: str) -> None:
    """As `note`; but a terminal that is gone stops nothing."""
    with suppress(OSError):
        note(text)
