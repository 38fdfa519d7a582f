"""Check a recipe's budget against its plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from recipec.compiler.plan.units import gib
from recipec.spec.diagnostics import Diagnostic

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.plan.results import Plan

DIGITS = 15
"""Significant digits of a decimal number that a float keeps."""


def check(program: Program, plan: Plan) -> list[Diagnostic]:
    """Return diagnostics for figures above the budget, and for limits that cannot be checked.

    Hours and US$ are compared with the estimate; the diagnostic also gives the estimate's interval.
    """
    return [*_memory(program, plan), *_run(program, plan)]


def _memory(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    most, memory = program.recipe.budget.max_hbm_share, plan.estimate.memory
    if most is None or memory.share <= most:
        return
    over = gib(memory.used - most * memory.available)
    over = "less than 0.01" if over == "0.00" else over
    yield Diagnostic(
        "E1002",
        f"the step takes an estimated {_above(100 * memory.share, 100 * most, 1)} % of each device's HBM, "
        f"and budget.max_hbm_share allows {_allowed(100 * most, 1)} %",
        "budget.max_hbm_share",
        f"it takes {gib(memory.used)} of {gib(memory.available)} GiB, {over} GiB too much: lower "
        "train.micro_batch_size, choose a remat.policy that stores less, or allow more",
    )


def _run(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    budget, run = program.recipe.budget, plan.run
    for key, most, estimate, code, verb, unit, better in (
        ("max_hours", budget.max_hours, run.hours, "E1003", "takes", "{} hours", "faster"),
        ("max_usd", budget.max_usd, run.usd, "E1004", "costs", "US$ {}", "cheaper"),
    ):
        if most is None:
            continue
        if estimate is None or (run.source == "bound" and estimate > most):
            yield _unchecked(key, plan)
        elif estimate > most:
            yield Diagnostic(
                code,
                f"the run {verb} an estimated {unit.format(_above(estimate, most))}, and budget.{key} allows "
                f"{_allowed(most)}",
                f"budget.{key}",
                f"with the known errors of such estimates it is {_between(run.interval.of(estimate), unit)}; "
                f"`recipe plan --search` looks for a {better} configuration",
            )


def _between(interval: tuple[float, float], unit: str) -> str:
    low, high = interval
    return unit.format(f"{low:,.2f} to {high:,.2f}")


def _above(number: float, most: float, digits: int = 2) -> str:
    """Format a number with enough decimals, and at least `digits`, to show that it is above `most`."""
    written = (f"{number:,.{count}f}" for count in range(digits, DIGITS))
    return next((said for said in written if float(said.replace(",", "")) > most), repr(number))


def _allowed(most: float, digits: int = 0) -> str:
    """Format a limit as the recipe gives it, with at least `digits` decimals."""
    said = f"{most:,.{DIGITS}g}"
    return said if "." in said or "e" in said or not digits else f"{most:,.{digits}f}"


def _unchecked(key: str, plan: Plan) -> Diagnostic:
    """Return the warning that a budget of hours or US$ cannot be checked, because the plan has no figure."""
    if plan.run.steps is None:
        reason = "the length of the run is not known"
        help = (
            "give train.steps, or put the data next to the recipe and give its tokenizer's folder with "
            "--model"
        )
    elif plan.run.hours is None:
        reason = "the step does not fit, so its time is not known"
        help = "make it fit first: lower train.micro_batch_size, or choose a remat.policy that stores less"
    elif key == "max_hours" or plan.run.usd is not None:
        reason = (
            f"the run has at most {plan.run.steps:,} steps, which are above the limit, but may have fewer"
        )
        help = (
            "give train.steps, or give the folder of the data's tokenizer with --model, so that they are "
            "counted"
        )
    else:
        reason = f"{plan.accelerator.partition(':')[0]} has no list price"
        help = "give the whole machine's price as cost.train_usd_per_hour"
    return Diagnostic("W1005", f"budget.{key} cannot be checked: {reason}", f"budget.{key}", help)
