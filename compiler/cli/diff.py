"""`recipe diff`."""

from __future__ import annotations

from recipec.compiler.cli.arguments.recipes import DiffArguments
from recipec.compiler.cli.planning import progress_line
from recipec.compiler.cli.printing import fail
from recipec.compiler.cli.reading import read
from recipec.compiler.explain.diff import diff as differences
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import statistics
from recipec.compiler.pages.document import Document
from recipec.compiler.pages.text import WIDTH
from recipec.compiler.pages.text import show as print_document
from recipec.compiler.plan.comparison import comparison
from recipec.compiler.plan.planner import plan as planned
from recipec.compiler.terminal import result


def diff(args: DiffArguments) -> None:
    """Run `recipe diff`."""
    sets = tuple(args.sets or ())
    sets_of_a = () if args.a.resolve() == args.b.resolve() else sets  # else there would be nothing to compare
    (_, before), (_, after) = read(args.a, sets_of_a, args.plan), read(args.b, sets, args.plan)
    if before.program is None or after.program is None:
        fail([*before.diagnostics, *after.diagnostics])
    result(differences(before.program, after.program, args.artifact), end="")
    if args.plan:
        result("")
        print_document(compare((before.program, sets_of_a), (after.program, sets)), WIDTH)


def compare(before: tuple[Program, tuple[str, ...]], after: tuple[Program, tuple[str, ...]]) -> Document:
    """Compare memory, time and cost of two programs, for `recipe diff --plan`.

    Args:
        before, after: a program with the --set that made it.
    """
    plans = []
    for program, sets in (before, after):
        with progress_line(f"planning {program.name}") as progress:
            plans.append(planned(program, sets, data=statistics(program), progress=progress))
    return comparison(*plans)
