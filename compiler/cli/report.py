"""`recipe report`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import typer

from recipec.compiler.cli.arguments.runs import ReportArguments
from recipec.compiler.errors import ArtifactError
from recipec.compiler.pages.html import require_plotly
from recipec.compiler.report.outcome import outcome_section
from recipec.compiler.report.reality import reality_section
from recipec.compiler.report.recorded_run import FACTS, labels, read_runs
from recipec.compiler.report.run_folder import METRICS, Folder, existing_folder
from recipec.compiler.report.run_page import GENERATOR, run_page
from recipec.compiler.report.sweep import read_sweep, sweep_page
from recipec.compiler.terminal import result, say
from recipec.compiler.writing import demand_writable, write_text
from recipec.runtime.checkpoints.record import LOCK

HEAD = 4096
"""Bytes of a file in which it is told whether it is a report."""


def report(args: ReportArguments) -> None:
    """Run `recipe report`."""
    require_plotly("recipe report", "report")
    names = [args.folders[0], *(args.compare or []), *args.folders[1:]]
    folders = [inner for name in names for inner in existing_folder(name).runs()]
    if {METRICS, LOCK, FACTS} & folders[0].entries().keys():
        page, name = _run_page(
            [folder.name for folder in folders], args.plan, args.recipe, args.results or []
        )
    else:
        if args.plan or args.recipe or args.results:
            raise typer.BadParameter("--plan, --recipe and --results apply to a run, not to a sweep")
        page, name = _sweep_page(folders)
    file = args.output or Path(re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100] + "-report.html")
    write(file, page)
    result(f"{file}: written")
    if args.show:
        typer.launch(file.absolute().as_uri())


def _run_page(
    names: list[str], plan: Path | None, recipe: Path | None, results: list[str]
) -> tuple[str, str]:
    runs = read_runs(names, recipe)
    page = run_page(runs, reality_section(runs[0], plan), outcome_section(runs[0], results))
    return page, runs[0].name


def _sweep_page(folders: Sequence[Folder]) -> tuple[str, str]:
    sweeps = []
    for folder, label in zip(folders, labels([folder.path for folder in folders]), strict=True):
        sweep = read_sweep(folder, label)
        if sweep is None:
            raise ArtifactError(
                f"{folder.name} contains neither a run nor a sweep",
                "give the folder of a run's checkpoints (with metrics.jsonl), or of a sweep's results (with "
                "summary.json)",
            )
        sweeps.append(sweep)
    if not any(sweep.measured for sweep in sweeps):
        say("note: no point of the sweep was measured")
    return sweep_page(sweeps), f"{sweeps[0].model.rpartition('/')[2] or 'sweep'}-sweep"


def write(file: Path, page: str) -> None:
    """Write a page atomically. It may replace only an earlier report.

    Raises:
        ArtifactError: the file is not a report, or cannot be written.
    """
    demand_writable(file)
    if file.exists():
        with file.open("rb") as existing:
            if GENERATOR.encode() not in existing.read(HEAD):
                raise ArtifactError(
                    f"{file} exists and is not a report: it was not changed", "name another file with -o"
                )
    write_text(file, page)
