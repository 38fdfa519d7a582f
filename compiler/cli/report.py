"""`recipe report`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from recipec.compiler.cli.base import result, say

if TYPE_CHECKING:
    from recipec.compiler.report.run_folder import Folder

HEAD = 4096
"""Bytes of a file in which it is told whether it is a report."""


def report(
    folders: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN_DIR",
            help="The folder of a run's checkpoints, a folder that contains such folders, or the results of "
            "a sweep; further ones are compared with it.",
        ),
    ],
    compare: Annotated[
        list[str] | None,
        typer.Option("--compare", metavar="RUN", help="Another run to compare with it."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE", help="The page; by default NAME-report.html."),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Output of `recipe plan --json`; by default the plan in recipec's cache.",
        ),
    ] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe", metavar="FILE", help="The run's recipe, to show where its values come from."
        ),
    ] = None,
    results: Annotated[
        list[str] | None,
        typer.Option(
            "--results",
            metavar="PATH",
            help="A merged folder, results of bench.sh or eval.sh, or JSON from `recipe serve verify`.",
        ),
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one HTML page of a run or of a serving sweep.

    The page needs no network. Folders may be addresses, such as gs://bucket/run.
    """
    from recipec.compiler.pages.html import require_plotly
    from recipec.compiler.report.run import FACTS
    from recipec.compiler.report.run_folder import METRICS, existing_folder
    from recipec.runtime.checkpoints.record import LOCK

    require_plotly("recipe report", "report")
    names = [folders[0], *(compare or []), *folders[1:]]
    found = [inner for name in names for inner in existing_folder(name).runs()]
    if {METRICS, LOCK, FACTS} & found[0].entries().keys():
        page, name = _run_page([folder.name for folder in found], plan, recipe, results or [])
    else:
        if plan or recipe or results:
            raise typer.BadParameter("--plan, --recipe and --results apply to a run, not to a sweep")
        page, name = _sweep_page(found)
    file = output or Path(re.sub(r"[^\w.-]+", "-", name).strip("-.")[:100] + "-report.html")
    write(file, page)
    result(f"{file}: written")
    if show:
        typer.launch(file.absolute().as_uri())


def _run_page(
    names: list[str], plan: Path | None, recipe: Path | None, results: list[str]
) -> tuple[str, str]:
    from recipec.compiler.report.outcome import outcome_section
    from recipec.compiler.report.page import run_page
    from recipec.compiler.report.reality import reality_section
    from recipec.compiler.report.run import read_runs

    runs = read_runs(names, recipe)
    page = run_page(runs, reality_section(runs[0], plan), outcome_section(runs[0], results))
    return page, runs[0].name


def _sweep_page(folders: Sequence[Folder]) -> tuple[str, str]:
    from recipec.compiler.errors import ArtifactError
    from recipec.compiler.report.run import labels
    from recipec.compiler.report.sweep import read_sweep, sweep_page

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
    from recipec.compiler.errors import ArtifactError
    from recipec.compiler.report.page import GENERATOR
    from recipec.compiler.writing import demand_writable, write_text

    demand_writable(file)
    if file.exists():
        with file.open("rb") as there:
            if GENERATOR.encode() not in there.read(HEAD):
                raise ArtifactError(
                    f"{file} exists and is not a report: it was not changed", "name another file with -o"
                )
    write_text(file, page)
