"""The command that takes probes in: `recipe calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from recipec.compiler.cli.base import FAILED, Format, read, result, show
from recipec.compiler.cli.plan import progress_line


def calibrate(
    probes: Annotated[
        list[Path],
        typer.Argument(metavar="PROBE...", help="probe.json files of machines."),
    ],
    recipe: Annotated[
        Path | None,
        typer.Option(
            "--recipe",
            metavar="RECIPE",
            help="The recipe that was probed; by default recipe.yaml next to each file.",
        ),
    ] = None,
) -> None:
    """Compare the step times of probes with their plans, and use them in later plans."""
    from recipec.compiler.errors import ArtifactError
    from recipec.compiler.plan import calibration
    from recipec.compiler.plan.planner import plan

    rows = []
    for file in probes:
        found = calibration.read(file)
        source = recipe or file.with_name("recipe.yaml")
        if not source.is_file():
            raise ArtifactError(
                f"{source}: there is no recipe next to the probe",
                "name the recipe that was probed with --recipe",
            )
        _, lowered = read(source, None, planning=True)
        program = lowered.program
        if program is None:
            show(lowered.diagnostics, Format.TEXT)
            raise typer.Exit(FAILED)
        if calibration.digest(program) != found["recipe"]:
            raise ArtifactError(
                f"{file} is the probe of another recipe than {source}",
                "name the recipe that was built with --recipe",
            )
        with progress_line(f"planning {program.name}") as progress:
            made = plan(program, progress=progress)
        row = calibration.measured(program, found, made)
        result(f"{file}: {program.name} on {program.accelerator.name}, {row.date}")
        for line in calibration.compared(program, found, made, row):
            result(f"  {line}")
        rows.append(row)
    calibration.keep(rows)
    result(f"{calibration.path()}: written; later plans use it and name it. Delete it to plan without it")
    result("The measured time of the whole micro-batch over the planned one is the factor of later plans")
