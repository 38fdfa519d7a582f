"""The commands on a model that has been trained: `recipe chat`, `recipe push`, `recipe adapters`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from recipec.compiler.cli.base import DONE, group, on_ctrl_c, result, say, tell

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


Method = Literal["linear", "ties", "dare_linear", "dare_ties"]

app = group("Combine PEFT adapters.", no_args_is_help=True)


@app.callback()
def adapters() -> None:
    """Make a group, although it has one command."""


@app.command()
def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="ADAPTER", help="Folders of PEFT adapters."),
    ],
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="DIR", help="Folder for the result; it must not exist."),
    ],
    weights: Annotated[
        str,
        typer.Option("--weights", metavar="W,W", help="One number for each adapter, such as 0.7,0.3."),
    ],
    method: Annotated[Method, typer.Option("--method", help="How to combine them.")] = "linear",
    density: Annotated[
        float | None,
        typer.Option(
            "--density",
            metavar="D",
            help="Share of each adapter's numbers that ties and dare keep, between 0 and 1.",
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option("--seed", metavar="N", help="Seed of the numbers that dare drops.")
    ] = 0,
) -> None:
    """Combine PEFT adapters of one base, as PEFT's add_weighted_adapter does.

    The base is not loaded. The result is a PEFT adapter of the same rank.
    """
    from recipec.compiler.trained.combine import Combination, combine

    try:
        numbers = [float(word) for word in weights.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{weights!r} is not a list of numbers", param_hint="--weights") from None
    if len(folders) < 2 or len(numbers) != len(folders):
        raise typer.BadParameter(
            f"{len(numbers)} for {len(folders)} adapters: give at least two adapters, and one weight for "
            "each",
            param_hint="--weights",
        )
    if not all(abs(number) < 1e6 for number in numbers) or not any(numbers):
        raise typer.BadParameter(
            f"{weights!r}: the numbers must be below 1e6, and not all 0", param_hint="--weights"
        )
    if (density is None) != (method == "linear") or not 0 < (density or 0.5) < 1:
        wanted = "linear takes none" if method == "linear" else f"{method} needs one, such as 0.5"
        raise typer.BadParameter(f"it must be above 0 and below 1; {wanted}", param_hint="--density")
    combine(Combination(folders, numbers, method, density, seed), output)
    tell(f"{output}: {len(folders)} adapters, {method}")
