"""`recipe push`."""

from __future__ import annotations

import typer

from recipec.compiler.cli.arguments.trained import PushArguments
from recipec.compiler.cli.guard import DONE
from recipec.compiler.terminal import on_ctrl_c, result, say
from recipec.compiler.trained.push import plan, upload


def push(args: PushArguments) -> None:
    """Run `recipe push`."""
    on_ctrl_c("nothing was committed")
    planned = plan(args.folder, args.repo, args.revision, args.public)
    say(str(planned))
    if not args.yes and not typer.confirm("upload?", err=True):
        raise typer.Exit(DONE)
    result(upload(planned))
