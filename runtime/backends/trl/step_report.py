"""The running report of another backend's run: the lines of metrics.jsonl, and the printed lines.

The format is that of runtime.metrics.loggers and runtime.metrics.run_report, but without jax and Tunix.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...data.batches import eval_line
from ...errors import UserError
from ...metrics.loggers import Metrics, done_line, last
from ...progress import duration

if TYPE_CHECKING:
    from ...metrics.services import Service


class BackendReport:
    """Writes, prints and keeps a run's numbers.

    Args:
        folder: holds metrics.jsonl; it is created.
        start, until: first and last optimizer step of this process; lines logged after `start` are dropped.
        every: steps between printed lines.
        tensorboard: whether to write TensorBoard files as well.
        peak: returns the peak memory so far, in bytes.
        services: the run's record in each logging service.
    """

    def __init__(
        self,
        folder: Path,
        start: int,
        until: int,
        every: int,
        tensorboard: bool,
        peak: Callable[[], int],
        services: Sequence[Service] = (),
    ) -> None:
        self._start, self._until, self._every, self._peak = start, until, every, peak
        self._loss: float | None = None
        self._eval_loss: float | None = None
        self._tokens = self._seconds = 0.0
        self._metrics = Metrics(folder, start or None, tensorboard, services)
        self._path, self.ends = self._metrics.path, self._metrics.ends
        self._begun = self._since = time.perf_counter()

    def step(
        self, step: int, loss: float, rate: float, norm: float, tokens: int, more: Mapping[str, float]
    ) -> None:
        """Record a finished optimizer step.

        Args:
            step: counted from 1.
            norm: of the step's gradient, before clipping.
            tokens: number of tokens without padding.
            more: the objective's numbers besides the loss, by their names in metrics.jsonl.

        Raises:
            UserError: the loss or the norm is not finite, or the numbers cannot be written.
        """
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        self._metrics.log(
            "train",
            step,
            {
                "loss": loss,
                "learning_rate": rate,
                "grad_norm": norm,
                **more,
                "tokens": tokens,
                "tokens_per_second": tokens / seconds,
                "step_seconds": seconds,
                "peak_memory_bytes": self._peak(),
            },
        )
        self._loss = loss
        for what, value in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(value):
                raise UserError(
                    f"step {step}: the {what} is {value}",
                    "lower train.optimizer.learning_rate or set max_grad_norm",
                )
        if step > self._start + 1:
            self._tokens += tokens
            self._seconds += seconds
        if step == self._start + 1 or step % self._every == 0 or step == self._until:
            left = ""
            if step > self._start + 1 and step < self._until:
                step_seconds = self._seconds / (step - self._start - 1)
                left = f", {duration(step_seconds * (self._until - step))} left"
            rates = f"lr {rate:.2e}, {tokens / seconds:.0f} tokens/s"
            self.say(f"step {step}/{self._until}: loss {loss:.4f}, {rates}{left}")

    def evaluation(self, step: int, losses: Mapping[str, float]) -> None:
        """Record the losses of an evaluation after an optimizer step; step 0 is the untrained model.

        Args:
            losses: the result of `runtime.data.evaluation.eval_losses`.
        """
        self._metrics.log("eval", step, losses)
        self._eval_loss = losses["loss"]
        self.say(eval_line(step, losses))
        self.restart()

    def restart(self) -> None:
        """Exclude the time since the last step from the time of the next."""
        self._since = time.perf_counter()

    def say(self, line: str) -> None:
        """Print a line."""
        print(line, file=sys.stderr, flush=True)

    def summary(self, step: int, early: str | None = None) -> str:
        """Return the last line of a run.

        Args:
            step: the last finished step.
            early: why the run ended before its last step.
        """
        loss = last(self._path, "loss") if self._loss is None else self._loss
        eval_loss = last(self._path, "eval_loss") if self._eval_loss is None else self._eval_loss
        speed = self._tokens / self._seconds if self._seconds else None
        return done_line(step, speed, loss, eval_loss, self._peak(), early)

    def close(self) -> None:
        """Close the files.

        Raises:
            UserError: the logged lines cannot be written.
        """
        try:
            self._metrics.flush()
        finally:
            self._metrics.close()
