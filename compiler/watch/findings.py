"""What looks wrong about a run's losses."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

WINDOW = 50
"""Steps that a loss is held against."""
ENOUGH = 10
"""Steps before which nothing is said of a spike."""
SPREADS, RATIO = 6.0, 1.5
"""A loss is a spike when it is above the mean by so many standard deviations, and above so many times it."""
RISES = 3
"""Evaluations in a row, each higher than the one before, that are told."""
KEPT = 8
"""Findings that are kept, the newest."""


class Losses:
    """Looks at losses as they come.

    Attributes:
        found: sentences, the newest last.
        rising: a sentence about evaluations that get worse, None while they do not.
    """

    def __init__(self) -> None:
        self.found: deque[str] = deque(maxlen=KEPT)
        self.rising: str | None = None
        self._window: deque[float] = deque()
        self._sum = self._squares = 0.0

    def step(self, step: int, loss: float | None, norm: float | None) -> None:
        """Takes an optimizer step's numbers."""
        for name, value in (("loss", loss), ("gradient's norm", norm)):
            if value is not None and not math.isfinite(value):
                self.found.append(f"step {step:,}: the {name} is {value}")
        if loss is None or not math.isfinite(loss):
            return
        count = len(self._window)
        if count >= ENOUGH:
            mean = self._sum / count
            spread = math.sqrt(max(0.0, self._squares / count - mean**2))
            if loss > mean + SPREADS * spread and loss > RATIO * mean:
                self.found.append(f"step {step:,}: the loss leapt to {loss:.4g}, from {mean:.4g}")
        self._window.append(loss)
        gone = self._window.popleft() if count == WINDOW else 0.0
        self._sum += loss - gone
        self._squares += loss**2 - gone**2

    def evaluation(self, evals: Sequence[tuple[int, float]]) -> None:
        """Looks at the evaluations so far, of which the last is new."""
        last = evals[-(RISES + 1) :]
        rises = len(last) > RISES and all(a[1] < b[1] for a, b in itertools.pairwise(last))
        self.rising = (
            f"eval_loss has risen since step {last[0][0]:,}, from {last[0][1]:.4g} to {last[-1][1]:.4g}"
            if rises
            else None
        )
