"""The command that takes probes in: `recipe calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli.base import FAILED, Format, read, result, show
from recipec.compiler.cli.plan import progress_line


def calibrate(
    probes: Annotated[
        list[Path], typer.Argument(metavar="PROBE...", help="probe.json of machines.", show_default=False)
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="What was probed; the recipe.yaml beside each file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Hold the step times of probes against their plans, and have later plans use them."""
    from recipec.compiler.errors import ArtifactError
    from recipec.compiler.plan import calibration
    from recipec.compiler.plan.planner import plan

    rows = []
    for file in probes:
        found = calibration.read(file)
        source = recipe or file.with_name("recipe.yaml")
        if not source.is_file():
            raise ArtifactError(f"{source}: no recipe beside the probe", "--recipe names what was probed")
        _, lowered = read(source, None, planning=True)
        program = lowered.program
        if program is None:
            show(lowered.diagnostics, Format.TEXT)
            raise typer.Exit(FAILED)
        if calibration.digest(program) != found["recipe"]:
            raise ArtifactError(
                f"{file}: a probe of another recipe than {source}", "--recipe names the one that was built"
            )
        with progress_line(f"planning {program.name}") as progress:
            made = plan(program, progress=progress)
        row = calibration.measured(program, found, made)
        result(f"{file}: {program.name} on {program.accelerator.name}, {row.date}")
        for line in calibration.compared(program, found, made, row):
            result(f"  {line}")
        rows.append(row)
    calibration.keep(rows)
    result(f"{calibration.path()}: plans use it, and name it; without it they are as before")
    result(
        "They are multiplied by found over planned of the whole micro-batch; its parts say why, and no more"
    )
