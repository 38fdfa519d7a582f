"""`recipe parity`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from recipec.compiler.cli.arguments.runs import ParityArguments
from recipec.compiler.cli.arguments.shared_arguments import Format
from recipec.compiler.cli.guard import DONE, FAILED
from recipec.compiler.cli.printing import fail, show
from recipec.compiler.cli.reading import read_program
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.parity.backend_runs import Backends, choose
from recipec.compiler.parity.backend_runs import parity as compared
from recipec.compiler.rehearse.pipeline import new_console
from recipec.compiler.terminal import on_ctrl_c
from recipec.runtime.errors import UserError, report


def parity(args: ParityArguments) -> None:
    """Run `recipe parity`."""
    limits = _limits(args.tolerances or ())
    if args.compare:
        if args.keep or args.backends or args.sets:
            raise typer.BadParameter(
                "it cannot be combined with --keep, --backend and --set", param_hint="--compare"
            )
        if len(args.paths) < 2:
            raise typer.BadParameter("name at least two traces: A.npz B.npz", param_hint="--compare")
        raise typer.Exit(_compare(args.paths, limits, args.as_json))
    if len(args.paths) > 1:
        raise typer.BadParameter("give one recipe; to compare traces, add --compare", param_hint="RECIPE")
    if args.paths[0].suffix == ".npz":
        raise typer.BadParameter(f"{args.paths[0]} looks like a trace: add --compare", param_hint="RECIPE")

    format: Format = "json" if args.as_json else "text"
    program, chosen = _chosen(args.paths[0], args.sets, args.backends or tuple(Backend), format)
    on_ctrl_c(None)
    # With --json, stdout is the JSON's alone.
    console = new_console(sys.stderr if args.as_json else None)
    comparison = compared(program, chosen, args.steps, args.keep, limits, console)
    if args.as_json:
        print(json.dumps(comparison.to_dict(), indent=2))
    raise typer.Exit(DONE if comparison.ok else FAILED)


def _chosen(
    path: Path, sets: Sequence[str] | None, backends: Sequence[Backend], format: Format
) -> tuple[Program, Backends]:
    """Return a recipe's program and the backends that can train it, or end the command if none can."""
    loaded, lowered, program = read_program(path, sets, format)
    chosen, refusals = choose(loaded, program, backends)
    diagnostics = [*lowered.diagnostics, *refusals]
    if chosen is None:
        fail(diagnostics, format)
    show(diagnostics)
    return program, chosen


def _compare(paths: Sequence[Path], limits: dict[str, float], as_json: bool) -> int:
    from recipec.compiler.parity.compare import compare_files, document, to_dict

    try:
        title, rows = compare_files(paths, limits)
    except UserError as error:
        report(error)
        return FAILED
    if as_json:
        print(json.dumps(to_dict(rows), indent=2))
    else:
        print_document(document(title, rows))
    return DONE if all(row.ok for row in rows) else FAILED


QUANTITIES = ("initial", "gradients", "losses", "trained", "merged")


def _limits(tolerances: Sequence[str]) -> dict[str, float]:
    """Parse limits of quantities from "QUANTITY=NUMBER"."""
    limits = {}
    for text in tolerances:
        name, _, value = text.partition("=")
        if name not in QUANTITIES:
            raise typer.BadParameter(
                f"{name!r} is not one of {', '.join(QUANTITIES)}", param_hint="--tolerance QUANTITY=X"
            )
        try:
            limits[name] = float(value)
        except ValueError:
            limits[name] = -1.0
        if not 0 <= limits[name] < float("inf"):
            raise typer.BadParameter(f"{value!r} is not a limit", param_hint=f"--tolerance {name}=X")
    return limits
