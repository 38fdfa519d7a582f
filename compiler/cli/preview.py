"""`recipe preview`."""

from __future__ import annotations

import json
import sys

import typer

from recipec.compiler.cli.arguments.recipes import PreviewArguments
from recipec.compiler.cli.guard import FAILED
from recipec.compiler.cli.printing import show
from recipec.compiler.cli.reading import read_program
from recipec.compiler.explain.preview import page, text
from recipec.compiler.explain.preview import preview as previewed
from recipec.compiler.pages import html
from recipec.compiler.terminal import color
from recipec.compiler.writing import write_text
from recipec.runtime.errors import UserError, report


def preview(args: PreviewArguments) -> None:
    """Run `recipe preview`."""
    if args.completions is not None and args.sample is not None:
        raise typer.BadParameter("--completions are given, and --sample generates: give one of them")
    _, lowered, program = read_program(args.recipe, args.sets, args.format)
    show(lowered.diagnostics)
    try:
        samples = previewed(
            *(program, args.count, args.split, args.model, args.data_dir),
            completions=args.sample if args.completions is None else args.completions,
            thumbnails=args.html is not None,
        )
    except UserError as error:
        report(error)
        raise typer.Exit(FAILED) from error
    if args.html is not None:
        write_text(args.html, html.write(page(samples)))
    if args.format == "json":
        print(json.dumps(samples.to_dict(), indent=2))
    else:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="backslashreplace")  # data may hold what the terminal has not
        print(text(samples, color(sys.stdout)), end="")
    if samples.problem:
        report(UserError(*samples.problem))
        raise typer.Exit(FAILED)
