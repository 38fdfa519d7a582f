"""Counts over a run's evaluations: the best one, and how many evaluations made no progress."""

from __future__ import annotations

from dataclasses import dataclass

from ..metrics.loggers import LOSS, Criterion
from ..sections import EarlyStopping


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run so far, counted as transformers' EarlyStoppingCallback and Trainer do.

    Evaluations at every `eval_every` steps count. One before the first step or at a --steps in between does
    not: an uninterrupted run would not have made it.

    Attributes:
        count: evaluations that were counted.
        best: the lowest cost (`Criterion.cost`), such as a loss, None before the first finite one.
        step: the optimizer step after which it was found.
        without: evaluations in a row without progress.
    """

    count: int = 0
    best: float | None = None
    step: int | None = None
    without: int = 0

    def after(self, step: int, cost: float, min_delta: float) -> Evaluations:
        """Return the counts with one more evaluation.

        Args:
            min_delta: a cost counts as progress if it is more than this below the lowest.
        """
        lowest = float("inf") if self.best is None else self.best
        progress = self.count == 0 or (cost < lowest and abs(cost - lowest) > min_delta)
        best = (cost, step) if cost < lowest else (self.best, self.step)
        return Evaluations(self.count + 1, *best, 0 if progress else self.without + 1)

    def ends(self, stopping: EarlyStopping | None) -> bool:
        """Return whether the run should stop."""
        return stopping is not None and self.without >= stopping.patience

    def sentence(self, step: int, criterion: Criterion = LOSS) -> str:
        """Say why a run stopped after a step."""
        best = "has not been a number"
        if self.best is not None:
            best = f"was {criterion.best}, {criterion.cost(self.best):.4f}, at {self.step}"
        times = f"{self.without} evaluation{'' if self.without == 1 else 's'}"
        return f"early stopping after step {step}: no progress in {times}; {criterion.name} {best}"
