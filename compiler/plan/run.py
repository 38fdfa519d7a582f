"""Hours and price of the whole run: its length is counted from the data when it is at hand, else bounded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from recipec.compiler.lowering.steps import run_length as from_lines
from recipec.compiler.plan.at_hand import Unavailable
from recipec.compiler.plan.counted import Statistics
from recipec.compiler.plan.results import Estimate, RunLength
from recipec.compiler.wording import plural

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

NOT_COUNTED = "Evaluation, checkpoints, start-up and compilation are not counted."


def run_length(
    program: Program, estimate: Estimate, counted: Statistics | Unavailable | None = None
) -> RunLength:
    """The run's steps, hours and price, and its speed in real tokens.

    Hours are optimizer steps x micro-batches x the estimated step. Speed is that of a full micro-batch.
    Without an estimate (0 s, of a step that the compiler refused) both are unknown: None, and 0 tokens/s.
    Where the data can be read but not tokenised, steps, hours and price are bounds: the most they can be.

    Args:
        counted: of `statistics`; None when nobody asked.
    """
    counted = counted or Unavailable("the data was not looked at")
    recipe = program.recipe
    train, data = recipe.train, recipe.data
    price = usd_per_hour(program)
    steps: int | None
    if isinstance(counted, Statistics):
        source, steps = "data", counted.steps(train)
        per_row, answers = counted.tokens_per_row, counted.answers
    else:
        source, steps = "steps", train.steps
        if steps is None:
            steps = from_lines(recipe, program.source.parent).bound
            source = "unknown" if steps is None else "bound"
        per_row, answers = float(data.max_length), 2 if data.format == "preference" else 1
    tokens = program.micro_batch_rows * answers * per_row
    micro_batches = program.accumulation_steps

    def hours(seconds: float) -> float | None:
        return steps * micro_batches * seconds / 3600 if steps and seconds else None

    def usd(seconds: float) -> float | None:
        time = hours(seconds)
        return None if time is None or price is None else time * price

    speed = tokens / estimate.seconds if estimate.seconds else 0.0
    calibrated_speed = tokens / estimate.calibrated_seconds if estimate.calibrated_seconds else 0.0
    return RunLength(
        source=source,
        tokens_per_row=per_row,
        steps=steps,
        micro_batches=micro_batches,
        hours=hours(estimate.seconds),
        usd=usd(estimate.seconds),
        calibrated_hours=hours(estimate.calibrated_seconds),
        calibrated_usd=usd(estimate.calibrated_seconds),
        usd_per_hour=price,
        tokens_per_second=speed,
        calibrated_tokens_per_second=calibrated_speed,
        usd_per_million_tokens=price / 3600 / speed * 1e6 if price is not None and speed else None,
        note=f"{_basis(program, counted)} {NOT_COUNTED}",
    )


def usd_per_hour(program: Program) -> float | None:
    """Of the whole training machine: the recipe's price, else the catalogue's; None without either."""
    given = program.recipe.cost.train_usd_per_hour
    return program.accelerator.usd_per_hour if given is None else given


def _basis(program: Program, counted: Statistics | Unavailable) -> str:
    """What the length and the speed of a run rest on, in a sentence."""
    recipe = program.recipe
    length = recipe.data.max_length
    if isinstance(counted, Statistics):
        pairs = counted.answers == 2
        left_out = f", {plural(counted.dropped, 'row')} left out" if counted.dropped else ""
        return (
            f"Counted in the data: {plural(counted.samples, 'pair' if pairs else 'sample')}{left_out}; "
            f"{plural(counted.rows, 'row')}{' of two answers' if pairs else ''} an epoch, with "
            f"{counted.tokens_per_row:,.0f} of {length:,} tokens on average "
            f"({100 * counted.tokens_per_row / length:.1f} % full)."
        )
    bound = f"tokens/s counts every row as full ({length:,} tokens), which is an upper bound"
    if recipe.train.steps is not None:
        return f"The steps are the recipe's, and {counted.reason}: {bound}."
    most = from_lines(recipe, program.source.parent).bound
    if most is None:
        return f"The length of the run is not known, since {counted.reason}; {bound}."
    return f"At most {plural(most, 'step')}, by the lines of its data, since {counted.reason}; {bound}."
