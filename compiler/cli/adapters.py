"""The commands `recipe adapters`: PEFT adapters that are there already."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli import completion
from recipec.compiler.cli.base import tell


class Method(str, Enum):  # noqa: UP042 (typer shows the values of a str enum)
    """How A's and B's are combined."""

    LINEAR = "linear"
    TIES = "ties"
    DARE_LINEAR = "dare_linear"
    DARE_TIES = "dare_ties"


app = typer.Typer(
    help="Combine PEFT adapters.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def group() -> None:
    """A group, although it has one command."""


@app.command()
def merge(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="ADAPTER",
            help="PEFT adapters' folders.",
            show_default=False,
            autocompletion=completion.trained_folders,
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="DIR", help="A new folder.", show_default=False)
    ],
    weights: Annotated[
        str,
        typer.Option(
            "--weights", metavar="W,W", help="A number for each, such as 0.7,0.3.", show_default=False
        ),
    ],
    method: Annotated[Method, typer.Option("--method", help="How they are combined.")] = Method.LINEAR,
    density: Annotated[
        float | None,
        typer.Option(
            "--density",
            metavar="D",
            help="The share of each adapter's numbers that ties and dare keep, above 0 and below 1.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of what dare leaves out.")] = 0,
) -> None:
    """Combine PEFT adapters of one base into one, as PEFT's add_weighted_adapter does.

    Nothing of the base is loaded. The result is a PEFT adapter of the same rank.
    """
    from recipec.compiler.trained.combine import Combination, combine

    try:
        numbers = [float(word) for word in weights.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{weights!r} is no list of numbers", param_hint="--weights") from None
    if len(folders) < 2 or len(numbers) != len(folders):
        raise typer.BadParameter(
            f"{len(numbers)} for {len(folders)} adapters: two adapters or more have one each",
            param_hint="--weights",
        )
    if not all(abs(number) < 1e6 for number in numbers) or not any(numbers):
        raise typer.BadParameter(f"{weights!r}: numbers below 1e6, not all of them 0", param_hint="--weights")
    if (density is None) != (method is Method.LINEAR) or not 0 < (density or 0.5) < 1:
        wanted = "linear has none" if method is Method.LINEAR else f"{method.value} needs one, such as 0.5"
        raise typer.BadParameter(f"above 0 and below 1; {wanted}", param_hint="--density")
    combine(Combination(folders, numbers, method.value, density, seed), output)
    tell(f"{output}: {len(folders)} adapters, {method.value}")
