"""`recipe rehearse`."""

from __future__ import annotations

import typer

from recipec.compiler.cli.arguments.runs import RehearseArguments
from recipec.compiler.cli.guard import DONE, FAILED
from recipec.compiler.cli.printing import show
from recipec.compiler.cli.reading import read_program
from recipec.compiler.rehearse.rehearse import rehearse as rehearsed
from recipec.compiler.terminal import on_ctrl_c


def rehearse(args: RehearseArguments) -> None:
    """Run `recipe rehearse`."""
    _, lowered, program = read_program(args.recipe, args.sets)
    show(lowered.diagnostics)
    on_ctrl_c(None)  # it says by itself what is there
    raise typer.Exit(DONE if rehearsed(program, args.steps, args.keep).ok else FAILED)
