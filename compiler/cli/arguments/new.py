"""The arguments of `recipe new`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

DataFormat = Literal["chat", "instruction", "prompt_completion", "text", "preference", "unpaired_preference"]
"""What a sample holds, as data.format."""


@dataclass(frozen=True)
class NewArguments:
    """Write a commented recipe for a model and a machine.

    On a terminal it asks for missing values. It replaces no existing file.
    """

    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Name of the recipe and of its artifact."),
    ]
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="ID", help="A Hugging Face id, or a directory with a checkpoint."),
    ] = None
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            metavar="NAME",
            help="The machine that trains, such as v6e-8; v6e alone is the cheapest that fits.",
        ),
    ] = None
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="PATH",
            help="A file of samples, or hf://OWNER/NAME; may be repeated. Without it the recipe names "
            "data/train.jsonl, which you add later.",
        ),
    ] = None
    format: Annotated[
        DataFormat | None,
        typer.Option("--format", help="What a sample contains; by default read from a local file."),
    ] = None
    method: Annotated[
        Literal["lora", "qlora", "dpo", "kto", "full"] | None,
        typer.Option(
            "--method",
            help="By default lora, qlora if lora does not fit, and dpo or kto for preference data.",
        ),
    ] = None
    serve: Annotated[
        str | None,
        typer.Option("--serve", metavar="NAME", help="The TPU that serves the model with vLLM, or none."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The recipe's folder; by default recipes, or this folder if it contains the data. Data "
            "outside of it gets a link in its data folder.",
        ),
    ] = None
    github: Annotated[
        bool, typer.Option("--github", help="Write a GitHub Actions workflow that checks the recipes.")
    ] = False
    pre_commit: Annotated[
        bool, typer.Option("--pre-commit", help="Make pre-commit check the recipes before each commit.")
    ] = False
