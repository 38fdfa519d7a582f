"""The commands on a model that has been trained: `recipe chat`, `recipe push`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli import completion
from recipec.compiler.cli.base import DONE, on_ctrl_c, result, say

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="FOLDER",
        help="A merged model, a PEFT adapter, or an artifact that has been merged.",
        show_default=False,
        autocompletion=completion.trained_folders,
    ),
]


def chat(
    folder: Folder,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="Answer this alone, and exit.", show_default=False),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="The system message.", show_default=False),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Tokens of one answer at most.")
    ] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=0.0,
            help="0 takes the likeliest tokens; without it, as the model's generation_config.json says.",
            show_default=False,
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base",
            metavar="DIR",
            help="An adapter's base, in place of the one that it names.",
            show_default=False,
        ),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option(
            "--chat-template",
            metavar="FILE",
            help="A chat template, in place of the model's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Talk to a trained model on this machine, by transformers.

    Each line of the terminal or of a pipe is a turn. /reset begins anew; /exit or Ctrl-D ends.
    """
    from recipec.compiler.trained.chat import Options, Talk, converse

    on_ctrl_c(None)
    talk = Talk(folder, Options(base, template, system, max_tokens, temperature), _say)
    if prompt is None:
        converse(talk)
    else:
        talk.answer(prompt)


def push(
    folder: Folder,
    repo: Annotated[
        str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hugging Face hub.", show_default=False)
    ],
    revision: Annotated[
        str,
        typer.Option("--revision", metavar="BRANCH", help="The branch, made from main where it is missing."),
    ] = "main",
    public: Annotated[bool, typer.Option("--public", help="A repository that all may read.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Upload a merged model or an adapter to the Hugging Face hub, privately.

    What will be uploaded, made and replaced is shown first. The token is HF_TOKEN's; HF_ENDPOINT is heeded.
    """
    from recipec.compiler.trained.push import plan, upload

    on_ctrl_c("nothing was committed")
    planned = plan(folder, repo, revision, public)
    say(str(planned))
    if not yes and not typer.confirm("upload?", err=True):
        raise typer.Exit(DONE)
    result(upload(planned))


def _say(text: str) -> None:
    from recipec.spec.diagnostics import printable

    sys.stdout.write(printable(text))
    sys.stdout.flush()
