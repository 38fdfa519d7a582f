"""`recipe sweep`: one recipe with several values of some keys, trained one after the other."""

from __future__ import annotations

import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from ruamel.yaml import YAML, YAMLError

from recipec.compiler.artifacts import artifact
from recipec.compiler.cli.arguments.runs import SweepArguments
from recipec.compiler.cli.builds import end_build
from recipec.compiler.cli.guard import FAILED
from recipec.compiler.cli.printing import fail
from recipec.compiler.cli.reading import read
from recipec.compiler.emitters.emit import emit
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.document import Table, sheet
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.report.recorded_run import ReportedRun, read_runs
from recipec.compiler.report.run_folder import METRICS, open_folder
from recipec.compiler.terminal import doing, note, say, tell
from recipec.runtime.metrics.loggers import REWARD
from recipec.runtime.metrics.run_state import FILE
from recipec.spec.diagnostics import has_errors

SUMMARY = "sweep.json"


@dataclass(frozen=True)
class Point:
    """A run of a sweep.

    Attributes:
        program: its recipe, with the values in it.
        values: by path.
        folder: of its artifact.
    """

    program: Program
    values: dict[str, Any]
    folder: Path

    @property
    def checkpoints(self) -> str:
        directory = self.program.recipe.checkpoint.directory
        return directory if "://" in directory else str(self.folder / directory)

    def ended(self) -> bool:
        """Return whether the run has finished all of its steps."""
        return open_folder(self.checkpoints).object(FILE).get("state") == "done"


def sweep(args: SweepArguments) -> None:
    """Run `recipe sweep`."""
    try:
        launched = shlex.split(args.launch or "")
    except ValueError as error:
        raise typer.BadParameter(f"{args.launch}: {error}", param_hint="--launch") from None
    points = _points(args.recipe, _combinations(args.over), args.sets or (), args.output)
    _build(points, args.output)
    tell(f"{args.output}: {len(points)} runs")
    command = [
        sys.executable,
        "train.py",
        "--resume",
        "--data-dir",
        str((args.data_dir or args.recipe.parent).resolve()),
    ]
    command += (
        ["--model", str(Path(args.model).resolve() if Path(args.model).exists() else args.model)]
        if args.model
        else []
    )
    failed = []
    for number, point in enumerate(points, 1):
        values = ", ".join(f"{path}={json.dumps(value)}" for path, value in point.values.items())
        if not launched and point.ended():
            say(f"{number}/{len(points)} {values}: completed already")
            continue
        say(f"{number}/{len(points)} {values}")
        if subprocess.run(launched or command, cwd=point.folder).returncode:
            failed.append(point.program.name)
            say(f"error: {point.program.name} failed; the other runs continue")
    if not launched and len(failed) < len(points):
        _compare(points, args.output)
    page = f"recipe report {' '.join(point.checkpoints for point in points)}"
    tell(f"{'when they have ended' if launched else 'a page that compares them'}: {page}")
    if failed:
        raise typer.Exit(FAILED)


def _combinations(over: Sequence[str]) -> list[dict[str, Any]]:
    """Return the values of each run by their paths.

    Raises:
        BadParameter: an --over is not a path with a list of values.
    """
    keys: dict[str, list[Any]] = {}
    for argument in over:
        path, equals, text = argument.partition("=")
        try:
            values = YAML(typ="safe", pure=True).load(text) if equals else None
        except YAMLError:
            values = None
        if not isinstance(values, list) or not values:
            raise typer.BadParameter(f"--over {argument}: write it as --over 'lora.rank=[8, 16]'")
        if (path := path.strip()) in keys:
            raise typer.BadParameter(f"--over {path} is given twice: write all of its values in one list")
        if path == "name":
            raise typer.BadParameter("--over name: the runs are named by their numbers")
        # A date is text, as everywhere in a recipe.
        keys[path] = json.loads(json.dumps(values, default=str))
    return [dict(zip(keys, chosen, strict=True)) for chosen in itertools.product(*keys.values())]


def _points(
    recipe: Path, combinations: Sequence[dict[str, Any]], sets: Sequence[str], output: Path
) -> list[Point]:
    """Return the runs, or end the command with the diagnostics of the first recipe with an error."""
    base = read(recipe, sets)[1].program
    width = len(str(len(combinations)))
    points = []
    for number, values in enumerate(combinations, 1):
        values_set = [f"{path}={json.dumps(value)}" for path, value in values.items()]
        named = base or read(recipe, [*sets, *values_set])[1].program
        if named is not None:
            values_set.append(f"name={named.name}-{number:0{width}}")
            directory = str(values.get("checkpoint.directory", named.recipe.checkpoint.directory))
            values_set += (
                [f"checkpoint.directory={directory}/{number:0{width}}"] if "://" in directory else []
            )
        _, lowered = read(recipe, [*sets, *values_set])
        if lowered.program is None or has_errors(lowered.diagnostics):
            say(f"with {', '.join(values_set)}:")
            fail(lowered.diagnostics)
        points.append(Point(lowered.program, values, output / lowered.program.name))
    return points


def _build(points: Sequence[Point], output: Path) -> None:
    """Write the artifacts."""
    end_build(output)
    with doing(f"writing {output}"):
        artifacts = {p.program.name: emit(p.program, ()) for p in points}
        for line in artifact.write(output, artifacts):
            (note if line.startswith("note: ") else say)(line)


def _compare(points: Sequence[Point], output: Path) -> None:
    """Print a table of the runs, with the best first, and write it."""
    started = [point for point in points if open_folder(point.checkpoints).status(METRICS) is not None]
    metrics = read_runs([point.checkpoints for point in started])
    runs = {point.program.name: run for point, run in zip(started, metrics, strict=True)}
    rows = [{"name": p.program.name, **p.values, **_figures(runs[p.program.name])} for p in started]
    measured = (name for name in FIGURES if any(row.get(name) is not None for row in rows))
    by = next(measured, "loss")
    sign = FIGURES.get(by, 1.0)
    rows.sort(key=lambda row: (row.get(by) is None, sign * (row.get(by) or 0.0)))
    (output / SUMMARY).write_text(json.dumps({"by": by, "runs": rows}, indent=2) + "\n", encoding="utf-8")
    names = list(dict.fromkeys(name for row in rows for name in row))
    values = [[_cell(row.get(name)) for name in names] for row in rows]
    print_document(sheet("", [Table(names, values)]))
    tell(f"{output / SUMMARY}: written")


FIGURES = {"best_eval_loss": 1.0, "best_eval_reward": -1.0}
"""The figures by which runs are compared, each with the sign that sorts the best first."""


def _figures(run: ReportedRun) -> dict[str, Any]:
    best, losses = run.best or (None, None), run.metrics.get("loss").finite
    rewarded = run.criterion is REWARD
    return {
        "best_eval_loss": None if rewarded else best[1],
        **({"best_eval_reward": best[1]} if rewarded else {}),
        "at_step": best[0],
        "loss": losses[-1][1] if losses else None,
        "tokens_per_second": run.tokens_per_second,
    }


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
