"""Choose how long a new recipe trains: epochs, batch, evaluations and checkpoints, by its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from recipec.compiler.lowering.run_length import ENOUGH_STEPS, Length
from recipec.compiler.new.draft import Draft, resized, shortest
from recipec.compiler.new.memory import Probe
from recipec.compiler.wording import divisors

USUAL_EPOCHS, MOST_EPOCHS = 3, 5
"""Passes over the data: the most with the usual batch, and the most for little data."""

EVERY = 100
"""Steps between evaluations, and between checkpoints, of a run that is long enough."""

PARTS = 5
"""Number of parts of a shorter run; an evaluation and a checkpoint end each part."""


class RunShape(NamedTuple):
    """The values that set the number of steps: passes over the data, rows per step, tokens per row."""

    epochs: int
    rows: int
    length: int


@dataclass(frozen=True)
class Pace:
    """The length of a run.

    Attributes:
        every: steps between evaluations, and between checkpoints.
        said: the length in words; "" if the data does not determine it.
    """

    epochs: int = 1
    every: int = EVERY
    said: str = ""


def paced(
    probe: Probe, draft: Draft, longest: int | None, length: Callable[[RunShape], Length]
) -> tuple[Draft, Pace]:
    """Return the draft with the largest batch, and its fewest epochs, that give enough steps.

    Args:
        longest: estimated length of the data's longest sample, in tokens; None if not known.
        length: computes the length of a run.
    """
    usual = RunShape(1, draft.rows, draft.length)
    chosen, found = usual, length(usual)
    if found.least is None or found.steps is None:
        return draft, Pace()
    for chosen in _choices(draft, shortest(draft, longest)):
        found = length(chosen)
        if (found.least or 0) >= ENOUGH_STEPS:
            break
    said = found.words()
    if (found.steps or 0) < ENOUGH_STEPS:
        said += f", since the samples are few: learning takes {ENOUGH_STEPS} or more"
    if (chosen.rows, chosen.length) != (draft.rows, draft.length):
        draft = resized(probe, draft, chosen.rows, chosen.length)
    return draft, Pace(chosen.epochs, min(EVERY, max(1, (found.least or 1) // PARTS)), said)


def _choices(draft: Draft, short: int) -> Iterator[RunShape]:
    """Yield shapes from the shortest run to the longest."""
    batches = [draft.fsdp * size for size in reversed(divisors(draft.rows // draft.fsdp))]
    for rows in batches:
        for epochs in range(1, USUAL_EPOCHS + 1):
            yield RunShape(epochs, rows, draft.length)
    for epochs in range(USUAL_EPOCHS, MOST_EPOCHS + 1):
        yield RunShape(epochs, batches[-1], short)
