"""The recipe's budget, held against its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from compiler.plan.units import gib, percent
from spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from compiler.plan.results import Plan
    from compiler.program import Program


def check(program: Program, plan: Plan) -> list[Diagnostic]:
    """What of the plan is above the budget, and what of the budget cannot be checked.

    Hours and US$ are held against the compiler's estimate; the calibrated figure is told beside it.
    """
    return [*_memory(program, plan), *_hours(program, plan), *_usd(program, plan)]


def _memory(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    most, memory = program.recipe.budget.max_hbm_share, plan.estimate.memory
    if most is None or memory.share <= most:
        return
    over = memory.used - most * memory.available
    yield Diagnostic(
        "E1002",
        f"the step takes an estimated {percent(memory.share)} of each device's HBM, and "
        f"budget.max_hbm_share allows {percent(most)}",
        "budget.max_hbm_share",
        f"it takes {gib(memory.used)} of {gib(memory.available)} GiB, {gib(over)} GiB too much: lower "
        "train.micro_batch_size, choose a remat.policy that stores less, or allow more",
    )


def _hours(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    most, run = program.recipe.budget.max_hours, plan.run
    if most is None:
        return
    if run.hours is None or run.calibrated_hours is None:
        yield _unchecked("max_hours", plan)
    elif run.hours > most:
        yield Diagnostic(
            "E1003",
            f"the run takes an estimated {run.hours:,.2f} hours, and budget.max_hours allows {most:,g}",
            "budget.max_hours",
            f"calibrated by the one published measurement it would be {run.calibrated_hours:,.2f} hours; "
            "`recipe plan --search` looks for a faster configuration",
        )


def _usd(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    most, run = program.recipe.budget.max_usd, plan.run
    if most is None:
        return
    if run.usd is None or run.calibrated_usd is None:
        yield _unchecked("max_usd", plan)
    elif run.usd > most:
        yield Diagnostic(
            "E1004",
            f"the run costs an estimated US$ {run.usd:,.2f}, and budget.max_usd allows {most:,g}",
            "budget.max_usd",
            f"calibrated by the one published measurement it would be US$ {run.calibrated_usd:,.2f}; "
            "`recipe plan --search` looks for a cheaper configuration",
        )


def _unchecked(key: str, plan: Plan) -> Diagnostic:
    """A budget of hours or US$ where the plan has none."""
    if plan.run.steps is None:
        reason = "the length of the run is not known"
        help = "give train.steps, or put the data beside the recipe and its tokenizer's folder after --model"
    elif plan.run.hours is None:
        reason = "the step does not fit, so that its time is not known"
        help = "make it fit first: lower train.micro_batch_size, or choose a remat.policy that stores less"
    else:
        reason = f"{plan.accelerator.partition(':')[0]} has no list price"
        help = "give the whole machine's price as cost.train_usd_per_hour"
    return Diagnostic("W1005", f"budget.{key} cannot be checked: {reason}", f"budget.{key}", help)
