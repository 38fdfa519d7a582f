"""The arguments of commands on a trained model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

Folder = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="A merged model, a PEFT adapter, or an artifact that was merged."),
]
Method = Literal["linear", "ties", "dare_linear", "dare_ties"]
"""How adapters are combined, as in PEFT."""


@dataclass(frozen=True)
class ChatArguments:
    """Chat with a trained model on this machine.

    Each line from the terminal or a pipe is a turn. /reset starts a new chat; /exit or Ctrl-D ends.
    """

    folder: Folder
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", metavar="TEXT", help="Answer only this prompt, and exit."),
    ] = None
    system: Annotated[
        str | None,
        typer.Option("--system", metavar="TEXT", help="The system message."),
    ] = None
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", min=1, help="Maximum number of tokens of an answer.")
    ] = 512
    temperature: Annotated[
        float | None,
        typer.Option(
            "--temperature",
            metavar="T",
            min=0.0,
            help="0 always takes the likeliest token; by default the model's generation_config.json decides.",
        ),
    ] = None
    base: Annotated[
        str | None,
        typer.Option(
            "--base", metavar="DIR", help="Base model of an adapter, instead of the one that it names."
        ),
    ] = None
    template: Annotated[
        Path | None,
        typer.Option("--chat-template", metavar="FILE", help="A chat template, instead of the model's."),
    ] = None
    engine: Annotated[
        Literal["auto", "jax", "transformers"],
        typer.Option(
            "--engine",
            help="What computes: JAX on a TPU or the CPU, with the packages that train, or transformers; "
            "auto takes JAX where it can.",
        ),
    ] = "auto"


@dataclass(frozen=True)
class PushArguments:
    """Upload a merged model or an adapter to the Hugging Face hub.

    The repository is private by default. The command first shows what it will upload, create and replace.
    It uses HF_TOKEN and HF_ENDPOINT.
    """

    folder: Folder
    repo: Annotated[str, typer.Argument(metavar="REPO", help="OWNER/NAME on the Hugging Face hub.")]
    revision: Annotated[
        str,
        typer.Option(
            "--revision", metavar="BRANCH", help="The branch; created from main if it does not exist."
        ),
    ] = "main"
    public: Annotated[bool, typer.Option("--public", help="Make the repository public.")] = False
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False


@dataclass(frozen=True)
class MergeAdaptersArguments:
    """Combine PEFT adapters of one base, as PEFT's add_weighted_adapter does.

    The base is not loaded. The result is a PEFT adapter of the same rank.
    """

    folders: Annotated[
        list[Path],
        typer.Argument(metavar="ADAPTER", help="Folders of PEFT adapters."),
    ]
    output: Annotated[
        Path,
        typer.Option("-o", "--output", metavar="DIR", help="Folder for the result; it must not exist."),
    ]
    weights: Annotated[
        str,
        typer.Option("--weights", metavar="W,W", help="One number for each adapter, such as 0.7,0.3."),
    ]
    method: Annotated[Method, typer.Option("--method", help="How to combine them.")] = "linear"
    density: Annotated[
        float | None,
        typer.Option(
            "--density",
            metavar="D",
            help="Share of each adapter's numbers that ties and dare keep, between 0 and 1.",
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of the numbers that dare drops.")] = 0
