"""`recipe adapters`."""

from __future__ import annotations

import typer

from recipec.compiler.cli.arguments.trained import MergeAdaptersArguments
from recipec.compiler.terminal import tell
from recipec.compiler.trained.combine import Combination, combine


def merge(args: MergeAdaptersArguments) -> None:
    """Run `recipe adapters merge`."""
    try:
        numbers = [float(word) for word in args.weights.split(",")]
    except ValueError:
        raise typer.BadParameter(
            f"{args.weights!r} is not a list of numbers", param_hint="--weights"
        ) from None
    if len(args.folders) < 2 or len(numbers) != len(args.folders):
        raise typer.BadParameter(
            f"{len(numbers)} for {len(args.folders)} adapters: give at least two adapters, and one weight "
            "for each",
            param_hint="--weights",
        )
    if not all(abs(number) < 1e6 for number in numbers) or not any(numbers):
        raise typer.BadParameter(
            f"{args.weights!r}: the numbers must be below 1e6, and not all 0", param_hint="--weights"
        )
    if (args.density is None) != (args.method == "linear") or not 0 < (args.density or 0.5) < 1:
        wanted = "linear takes none" if args.method == "linear" else f"{args.method} needs one, such as 0.5"
        raise typer.BadParameter(f"it must be above 0 and below 1; {wanted}", param_hint="--density")
    combine(Combination(args.folders, numbers, args.method, args.density, args.seed), args.output)
    tell(f"{args.output}: {len(args.folders)} adapters, {args.method}")
