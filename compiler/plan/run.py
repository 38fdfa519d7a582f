"""How long the whole run is: counted from the recipe's data when it is at hand, else as the recipe says.

The data is read, tokenised and packed by the code that train.py runs; the weights are not needed, nothing
is downloaded and jax is not imported. The few numbers that come out are kept, under a key of everything
that they follow from.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pydantic import TypeAdapter, ValidationError

from compiler.errors import ArtifactError
from compiler.packages import install, missing_packages
from compiler.plan.at_hand import AtHand, Unavailable, contents, look
from compiler.plan.results import Estimate, RunLength
from compiler.preview import PACKAGES
from compiler.steps import run_length as from_lines
from compiler.wording import plural

if TYPE_CHECKING:
    from compiler.program import Program
    from spec.language import Train

NOT_COUNTED = "Evaluation, checkpoints, start-up and compilation are not counted."


@dataclass(frozen=True)
class Statistics:
    """The training data of a recipe, tokenised and laid into rows.

    Attributes:
        samples: that are kept; of preferences, pairs.
        dropped: rows of the files that are not.
        rows: of an epoch, as train.global_batch_size counts them: both answers of a preference are one.
        answers: rows of tokens in each of them: 2 of a preference, else 1.
        tokens: real ones of an epoch.
    """

    samples: int
    dropped: int
    rows: int
    answers: int
    tokens: int

    @property
    def tokens_per_row(self) -> float:
        """Real tokens of a row of max_length, on average."""
        return self.tokens / (self.rows * self.answers)

    def steps(self, train: Train) -> int:
        """Optimizer steps of a run, as runtime.data.prepare counts them."""
        if train.steps is not None:
            return train.steps
        return (train.epochs or 1) * math.ceil(self.rows / train.global_batch_size)


class Store(Protocol):
    """What compiler.plan.store offers."""

    def key(self, *parts: object) -> str: ...

    def get(self, name: str, /) -> str | None: ...

    def put(self, name: str, value: str, /) -> None: ...


STATISTICS: TypeAdapter[Statistics] = TypeAdapter(Statistics)


def statistics(
    program: Program, model: Path | None = None, data_dir: Path | None = None, store: Store | None = None
) -> Statistics | Unavailable:
    """Counts the training data of a recipe; it takes as long as tokenising does, unless it is in the store.

    Args:
        model, data_dir: as for `at_hand.look`.
        store: None for the one of plans.

    Raises:
        ArtifactError: what was given is not there, or train.py would refuse the data.
    """
    missing = missing_packages(PACKAGES)
    if missing:
        return Unavailable(f"{', '.join(missing)} cannot be imported ({install('train', 'plan')})")
    found = look(program, model, data_dir)
    if isinstance(found, Unavailable):
        return found
    if store is None:
        from compiler.plan import store as plans

        store = plans
    key = store.key("statistics", contents(found))
    kept = store.get(key)
    if kept is not None:
        with suppress(ValidationError):  # an entry that cannot be read is made again
            return STATISTICS.validate_json(kept)
    counted = _count(found)
    store.put(key, STATISTICS.dump_json(counted).decode())
    return counted


def run_length(
    program: Program, estimate: Estimate, counted: Statistics | Unavailable | None = None
) -> RunLength:
    """The run's steps, hours and price, and its speed in real tokens.

    Hours are optimizer steps x micro-batches x the estimated step. Speed is that of a full micro-batch.
    Without an estimate (0 s, of a step that the compiler refused) both are unknown: None, and 0 tokens/s.

    Args:
        counted: of `statistics`; None when nobody asked.
    """
    counted = counted or Unavailable("the data was not looked at")
    train, data = program.recipe.train, program.recipe.data
    price = usd_per_hour(program)
    steps: int | None
    if isinstance(counted, Statistics):
        source, steps = "data", counted.steps(train)
        per_row, answers = counted.tokens_per_row, counted.answers
    else:
        source, steps = ("unknown" if train.steps is None else "steps"), train.steps
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
    most = from_lines(recipe, program.source.parent).steps
    at_most = "" if most is None else f" (at most {plural(most, 'step')}, by the lines of its data)"
    return f"The length of the run is not known{at_most}, since {counted.reason}; {bound}."


def _count(found: AtHand) -> Statistics:
    """Tokenises and packs as train.py does."""
    from runtime.data.prepare import prepare
    from runtime.data.tokenizer import load_tokenizer
    from runtime.errors import UserError
    from runtime.settings import TrainSettings

    # Batches of one row: how many rows a batch has is no matter of the data.
    alone = TrainSettings(epochs=1, global_batch_size=1, micro_batch_size=1)
    try:
        tokenizer = load_tokenizer(found.model_dir, found.model, found.data, found.data_dir)
        prepared = prepare(found.data, alone, 1, tokenizer, found.data_dir, found.vocabulary)
    except UserError as error:
        raise ArtifactError(error.message, error.help) from error
    report, answers = prepared.report.train, prepared.samples.group
    samples = len(prepared.samples) // answers
    return Statistics(
        samples=samples,
        dropped=report.read - samples,
        rows=prepared.steps_per_epoch,
        answers=answers,
        tokens=report.row_tokens,
    )
