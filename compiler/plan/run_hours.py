"""Compute the hours and the price of a run: steps of its recipe times the step time of a plan, or measured
seconds of a run's metrics."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.lowering.at_hand import Unavailable
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import Statistics, run_length, steps_left
from recipec.compiler.plan.results import Estimate, Generation, Interval, RunLength
from recipec.compiler.wording import plural

METRICS = "metrics.jsonl"

NOT_COUNTED = "Evaluation, checkpoints, start-up and compilation are not counted."
REWARDS_NOT_COUNTED = (
    "Completions count with their largest length. Rewards, groups that are drawn again, checkpoints, "
    "start-up and compilation are not counted."
)
SERVER_NOT_COUNTED = (
    "The server that generates is not counted, neither its price nor the time in which a step waits for it. "
    "Rewards, checkpoints, start-up and compilation are not counted."
)


def planned_length(
    program: Program,
    estimate: Estimate,
    counted: Statistics | Unavailable | None = None,
    generation: Generation | None = None,
) -> RunLength:
    """Return the run's steps, hours and price, and its speed in tokens without padding.

    Hours are optimizer steps x (micro-batches x the estimated step, and a step's share of generation). The
    speed is that of a full micro-batch, with its share of generation.
    If there is no estimate (0 s, for a step that the compiler refused), both are unknown: None, and 0
    tokens/s. If the data can be read but not tokenized, steps, hours and price are upper bounds.

    Args:
        counted: the result of `statistics`; None if it was not requested.
        generation: of the completions that it trains on; None where there is none.
    """
    counted = counted or Unavailable("the data was not read")
    recipe = program.recipe
    train, data = recipe.train, recipe.data
    price = program.usd_per_hour
    steps: int | None
    if isinstance(counted, Statistics):
        source, steps = "data", counted.steps(train)
        per_row, answers = counted.tokens_per_row, counted.answers
        if train.grpo is not None:  # what was counted are prompts
            per_row = float(data.max_length)
    else:
        source, steps = "steps", train.steps
        if steps is None:
            steps = run_length(recipe, program.source.parent).bound
            source = "unknown" if steps is None else "bound"
        per_row, answers = float(data.max_length), 2 if data.format == "preference" else 1
    tokens = program.micro_batch_rows * answers * per_row
    micro_batches = program.accumulation_steps
    left = steps_left(train, steps or 0)
    update, interval = micro_batches * estimate.seconds, estimate.interval
    step = update
    if generation is not None and update:
        step = sum(generation.parts(update).values())
        interval = _with_generation(generation, update, interval)
    hours = left * step / 3600 if left and step else None
    speed = tokens * micro_batches / step if step else 0.0
    return RunLength(
        source=source,
        tokens_per_row=per_row,
        steps=steps,
        micro_batches=micro_batches,
        hours=hours,
        usd=None if hours is None or price is None else hours * price,
        interval=interval,
        usd_per_hour=price,
        tokens_per_second=speed,
        usd_per_million_tokens=price / 3600 / speed * 1e6 if price is not None and speed else None,
        note=f"{_basis(program, counted)} {_not_counted(program, generation)}",
    )


def _not_counted(program: Program, generation: Generation | None) -> str:
    if generation is not None:
        return REWARDS_NOT_COUNTED
    served = program.recipe.train.grpo is not None and program.recipe.rollout.engine == "vllm"
    return SERVER_NOT_COUNTED if served else NOT_COUNTED


def _with_generation(generation: Generation, update: float, interval: Interval) -> Interval:
    """Return the interval of a step with its generation, which takes at least as long as its slowest part.

    Args:
        update: seconds of the compiled steps, with the interval `interval`.
    """
    parts = generation.parts(update)
    rolled = generation.seconds_per_step
    trained = sum(parts.values()) - rolled
    low = interval.low * trained + generation.bound_per_step
    high = interval.high * (trained + rolled)
    basis = "No rollout was measured: the lower end is one in which memory, arithmetic and links overlap."
    return Interval(low / (trained + rolled), high / (trained + rolled), f"{interval.basis} {basis}")


def _basis(program: Program, counted: Statistics | Unavailable) -> str:
    """Describe in a sentence what the length and the speed of a run are based on."""
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
    most = run_length(recipe, program.source.parent).bound
    if most is None:
        return f"The length of the run is not known, since {counted.reason}; {bound}."
    return f"At most {plural(most, 'step')}, by the lines of its data, since {counted.reason}; {bound}."


@dataclass(frozen=True)
class Hours:
    """The duration of training.

    Attributes:
        source: a phrase that says where the hours come from, and whether they are measured or estimated.
    """

    hours: float
    source: str


def training_hours(
    hours: float | None = None,
    run: Path | None = None,
    planned: RunLength | None = None,
    steps: int | None = None,
) -> Hours:
    """Return how long training takes, from the first of these sources that is available.

    Args:
        given: hours that the user gave.
        run: the folder of a run, with its metrics.jsonl.
        planned: hours of the recipe's plan.
        steps: the recipe's steps, if it gives them.

    Raises:
        ArtifactError: no source has the hours, or a source has an invalid value.
    """
    check_hours(hours, "--train-hours")
    if hours is not None:
        return Hours(hours, "--train-hours")
    if run is not None:
        return measured_hours(run, steps)
    most = "at most, by the lines of the data: " if planned is not None and planned.source == "bound" else ""
    if planned is not None and planned.hours is not None:
        low, high = planned.interval.of(planned.hours)
        return Hours(planned.hours, f"{most}estimate of `recipe plan`, {low:.2f} to {high:.2f} h")
    reason, way = "it was not planned", "--set train.steps=N"
    if planned is not None:
        reason = planned.note
    if planned is not None and planned.steps is not None:
        reason = "the compiler refused its step, so the step's time is not known"
        way = "the change that `recipe plan` suggests to make the step fit"
    raise ArtifactError(
        f"it is not known how long the training takes: {reason}",
        f"give --train-hours, a measured run with --run DIR, or {way}",
    )


def measured_hours(run: Path, steps: int | None = None) -> Hours:
    """Return the duration of a run's steps, from its metrics.jsonl.

    The first step includes compilation. Loading, saving and evaluating are not included.

    Args:
        run: the folder that train.py wrote metrics.jsonl to.
        steps: the steps that the recipe asks for, to recognize a run that ended early; None where unknown.

    Raises:
        ArtifactError: there are no metrics to read.
    """
    path = run / METRICS
    way_out = "give the folder that train.py wrote its metrics to, or the hours with --train-hours"
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ArtifactError(f"there is no {METRICS} in {run}", way_out) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}", way_out) from error
    seconds = dict(_step_seconds(content))
    if not seconds:
        raise ArtifactError(f"{path} has no timed training step", way_out)
    first, last = min(seconds), max(seconds)
    which = f"steps {first:,} to {last:,}"
    if len(seconds) != last - first + 1:
        which = f"{plural(len(seconds), 'step')} of {first:,} to {last:,}"
    if steps is not None and len(seconds) < steps:
        which += f" of the recipe's {steps:,}"
    return Hours(sum(seconds.values()) / 3600, f"measured: {which} in {path}, without loading and saving")


def check_hours(hours: float | None, flag: str) -> None:
    """Refuse hours that are negative, infinite or NaN.

    Raises:
        ArtifactError: the hours are invalid; the message names the flag.
    """
    if hours is not None and not 0 <= hours < math.inf:
        raise ArtifactError(
            f"{flag} is {hours:g}, which is not a number of hours", f"for example {flag} 3.34"
        )


def _step_seconds(content: str) -> Iterator[tuple[int, float]]:
    """Yield (step, seconds) of each training step, skipping incomplete lines and those of evaluations."""
    for line in content.splitlines():
        entry = json_value(line)
        if not isinstance(entry, Mapping):
            continue
        step, seconds = entry.get("step"), entry.get("step_seconds")
        if isinstance(step, int) and isinstance(seconds, int | float) and 0 <= seconds < math.inf:
            yield step, float(seconds)
