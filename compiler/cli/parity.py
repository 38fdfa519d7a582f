"""The command `recipe parity`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipec.compiler.cli.base import (
    DONE,
    FAILED,
    AsJson,
    Format,
    Keep,
    Sets,
    fail,
    on_ctrl_c,
    print_document,
    read_program,
    show,
)
from recipec.compiler.lowering.backend import Backend

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.parity.backend_runs import Backends


def parity(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="RECIPE", help="YAML file of a recipe; with --compare, traces."),
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="Compare traces (.npz) that the scripts wrote with --trace.")
    ] = False,
    backends: Annotated[
        list[Backend] | None,
        typer.Option("--backend", help="A backend to compare; may be repeated. By default all."),
    ] = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to run.")] = 20,
    keep: Keep = None,
    tolerances: Annotated[
        list[str] | None,
        typer.Option(
            "--tolerance",
            metavar="QUANTITY=X",
            help="Another limit for initial, gradients, losses, trained or merged; may be repeated.",
        ),
    ] = None,
    as_json: AsJson = False,
    sets: Sets = None,
) -> None:
    """Train the recipe in miniature with each backend, and compare the results.

    Exits with 1 if two backends differ by more than the limits.
    """
    limits = _limits(tolerances or ())
    if compare:
        if keep or backends or sets:
            raise typer.BadParameter(
                "it cannot be combined with --keep, --backend and --set", param_hint="--compare"
            )
        if len(paths) < 2:
            raise typer.BadParameter("name at least two traces: A.npz B.npz", param_hint="--compare")
        raise typer.Exit(_compare(paths, limits, as_json))
    if len(paths) > 1:
        raise typer.BadParameter("give one recipe; to compare traces, add --compare", param_hint="RECIPE")
    if paths[0].suffix == ".npz":
        raise typer.BadParameter(f"{paths[0]} looks like a trace: add --compare", param_hint="RECIPE")
    from recipec.compiler.parity.backend_runs import parity as compared
    from recipec.compiler.rehearse.pipeline import new_console

    format: Format = "json" if as_json else "text"
    program, chosen = _chosen(paths[0], sets, backends or tuple(Backend), format)
    on_ctrl_c(None)
    # With --json, stdout is the JSON's alone.
    console = new_console(sys.stderr if as_json else None)
    found = compared(program, chosen, steps, keep, limits, console)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    raise typer.Exit(DONE if found.ok else FAILED)


def _chosen(
    path: Path, sets: Sequence[str] | None, backends: Sequence[Backend], format: Format
) -> tuple[Program, Backends]:
    """Return a recipe's program and the backends that can train it, or end the command if none can."""
    from recipec.compiler.parity.backend_runs import choose

    loaded, lowered, program = read_program(path, sets, format)
    chosen, refusals = choose(loaded, program, backends)
    diagnostics = [*lowered.diagnostics, *refusals]
    if chosen is None:
        fail(diagnostics, format)
    show(diagnostics)
    return program, chosen


def _compare(paths: Sequence[Path], limits: dict[str, float], as_json: bool) -> int:
    from recipec.compiler.parity.compare import compare_files, document, to_dict
    from recipec.runtime.errors import UserError, report

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


def _limits(given: Sequence[str]) -> dict[str, float]:
    """Parse limits of quantities from "QUANTITY=NUMBER"."""
    limits = {}
    for text in given:
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
