"""What is counted of a run's evaluations: the lowest loss, and how long there was no progress."""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import EarlyStopping


@dataclass(frozen=True)
class Evaluations:
    """The evaluations of a run so far, counted as transformers' EarlyStoppingCallback and Trainer do.

    Those every `eval_every` steps count; one before the first step or at a --steps in between does not, which
    a run in one piece would not have made.

    Attributes:
        count: of all that were counted.
        best: the lowest loss, None before there was any number.
        step: the optimizer step that it was found after.
        without: evaluations in a row without progress.
    """

    count: int = 0
    best: float | None = None
    step: int | None = None
    without: int = 0

    def after(self, step: int, loss: float, min_delta: float) -> Evaluations:
        """With one more.

        Args:
            min_delta: how far below the lowest a loss has to be to count as progress; more than that.
        """
        lowest = float("inf") if self.best is None else self.best
        progress = self.count == 0 or (loss < lowest and abs(loss - lowest) > min_delta)
        best = (loss, step) if loss < lowest else (self.best, self.step)
        return Evaluations(self.count + 1, *best, 0 if progress else self.without + 1)

    def ends(self, stopping: EarlyStopping | None) -> bool:
        """Whether the run is to stop."""
        return stopping is not None and self.without >= stopping.patience

    def sentence(self, step: int) -> str:
        """Why a run stopped after a step."""
        found = (
            "has not been a number" if self.best is None else f"was lowest, {self.best:.4f}, at {self.step}"
        )
        times = f"{self.without} evaluation{'' if self.without == 1 else 's'}"
        return f"early stopping after step {step}: no progress in {times}; eval_loss {found}"
