"""`recipe calibrate`."""

from __future__ import annotations

from recipec.compiler.cli.arguments.planning import CalibrateArguments
from recipec.compiler.cli.planning import progress_line
from recipec.compiler.cli.reading import read_program
from recipec.compiler.errors import ArtifactError
from recipec.compiler.plan import calibration
from recipec.compiler.plan.planner import plan
from recipec.compiler.terminal import result


def calibrate(args: CalibrateArguments) -> None:
    """Run `recipe calibrate`."""
    rows = []
    for file in args.probes:
        probe = calibration.read(file)
        source = args.recipe or file.with_name("recipe.yaml")
        if not source.is_file():
            raise ArtifactError(
                f"{source}: there is no recipe next to the probe",
                "name the recipe that was probed with --recipe",
            )
        program = read_program(source, None, planning=True)[2]
        if calibration.digest(program) != probe["recipe"]:
            raise ArtifactError(
                f"{file} is the probe of another recipe than {source}",
                "name the recipe that was built with --recipe",
            )
        with progress_line(f"planning {program.name}") as progress:
            planned = plan(program, progress=progress)
        row = calibration.measured(program, probe, planned)
        result(f"{file}: {program.name} on {program.accelerator.name}, {row.date}")
        for line in calibration.compared(program, probe, planned, row):
            result(f"  {line}")
        rows.append(row)
    calibration.keep(rows)
    result(f"{calibration.path()}: written; later plans use it and name it. Delete it to plan without it")
    result("The measured time of the whole micro-batch over the planned one is the factor of later plans")
