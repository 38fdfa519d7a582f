"""The commands on a model that has been trained: `recipe chat`, `recipe push`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli.base import DONE, on_ctrl_c, result, say

Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="A merged model, a PEFT adapter, or an artifact that was merged."),
]


def chat(
    folder: Folder,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="Answer only this prompt, and exit."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="The system message."),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Maximum number of tokens of an answer.")
    ] = 512,
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=0.0,
            help="0 always takes the likeliest token; by default the model's generation_config.json decides.",
        ),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="DIR", help="Base model of an adapter, instead of the one that it names."
        ),
    ] = None,
    template: Annotated[
        Path | None,
        typer.Option("--chat-template", metavar="FILE", help="A chat template, instead of the model's."),
    ] = None,
) -> None:
    """Chat with a trained model on this machine, using transformers.

    Each line from the terminal or a pipe is a turn. /reset starts a new chat; /exit or Ctrl-D ends.
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
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hugging Face hub.")],
    revision: Annotated[
        str,
        typer.Option(
            "--revision", metavar="BRANCH", help="The branch; created from main if it does not exist."
        ),
    ] = "main",
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Upload a merged model or an adapter to the Hugging Face hub.

    The repository is private by default. The command first shows what it will upload, create and replace.
    It uses HF_TOKEN and HF_ENDPOINT.
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
