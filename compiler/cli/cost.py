"""`recipe cost`."""

from __future__ import annotations

import typer

from recipec.compiler.cli.arguments.planning import CostArguments
from recipec.compiler.cli.arguments.shared_arguments import Format
from recipec.compiler.cli.planning import progress_line, refuse_backend, refused_flags
from recipec.compiler.cli.reading import read_program
from recipec.compiler.explain.cost import COST, document
from recipec.compiler.explain.cost import cost as compute
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.plan import plan_session
from recipec.compiler.plan.run_hours import training_hours


def cost(args: CostArguments) -> None:
    """Run `recipe cost`."""
    if args.train_hours is not None and args.run is not None:
        raise typer.BadParameter(
            "--train-hours also gives the hours: keep one of the two", param_hint="--run"
        )
    format: Format = "json" if args.as_json else "text"
    loaded, _, program = read_program(args.recipe, args.sets, format, planning=True)
    planned = None
    if args.train_hours is None and args.run is None:
        refuse_backend(loaded, program, args.backend, format)
        with refused_flags(loaded, format), progress_line(f"planning {program.name}") as progress:
            options = plan_session.PlanOptions(
                tuple(args.sets or ()), model=args.model, data_dir=args.data_dir, backend=args.backend
            )
            planned = plan_session.plan_run(program, options, progress)
    costs = compute(
        program, training_hours(args.train_hours, args.run, planned, program.recipe.train.steps), args.hours
    )
    if args.as_json:
        print(COST.dump_json(costs, indent=2).decode())
    else:
        print_document(document(costs))
