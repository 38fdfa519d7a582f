"""The commands `recipe adapters`: PEFT adapters that are there already."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from recipec.compiler.cli.base import group, tell

Method = Literal["linear", "ties", "dare_linear", "dare_ties"]

app = group("Combine PEFT adapters.", no_args_is_help=True)


@app.callback()
def adapters() -> None:
    """A group, although it has one command."""


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
