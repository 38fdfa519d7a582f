"""The arguments of `recipe models`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli.arguments.shared_arguments import AsJson


@dataclass(frozen=True)
class ListModelsArguments:
    """List the models of the catalog, with their sizes and what works with each.

    `recipe models WORD` does the same.
    """

    word: Annotated[
        str,
        typer.Argument(
            metavar="WORD", help="Part of an id or of a family name; without it, all models are listed."
        ),
    ] = ""
    as_json: AsJson = False


@dataclass(frozen=True)
class AddModelArguments:
    """Add a model from the hub, without downloading its weights.

    It fetches config.json, the tokenizer's files, and the names, shapes and types of all tensors, which
    `recipe check` compares with the model's family. It uses HF_ENDPOINT, HF_TOKEN and the hub's cache.
    """

    model: Annotated[str, typer.Argument(metavar="ID", help="OWNER/NAME on the Hugging Face hub.")]
    revision: Annotated[
        str | None,
        typer.Option("--revision", metavar="R", help="A branch, tag or commit; by default the main branch."),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            metavar="DIR",
            help="The folder of models, next to the recipes; by default recipes/models if a folder recipes "
            "exists, otherwise models.",
        ),
    ] = None
