"""The training loop: optimizer steps, evaluation, checkpoints and a run's trace."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from typing import Any

import jax
import numpy as np

from ...checkpoints.saving import kept
from ...data.batches import TrainingData, eval_line, eval_losses
from ...errors import UserError
from ...interrupts import Interrupted, Interrupts
from ...metrics.loggers import Metrics, Nowhere
from ...metrics.run_report import Named, NotFinite, Numbers, Report
from ...model import sharding
from ...settings import ModelSettings
from ...training.losses import Batch
from ...training.step import TrainState
from ...training.trace import Trace, count_targets
from .hf_model import Arrays
from .torchax_checkpoints import Checkpoints
from .torchax_step import Step

PACKAGES = ("jax", "torchax", "torch", "transformers", "peft", "optax")


class Trainer:
    """Runs optimizer steps from a given state.

    Args:
        step: the step's functions.
        live: the initial state; its arrays are donated.
        base: the arrays that training does not change.
        done: number of optimizer steps that `live` has completed.
        checkpoints: the writer of checkpoints.
        every: optimizer steps between checkpoints.
        trace: is filled during the run; None for no trace.

    Attributes:
        live: the newest state.
        done: number of optimizer steps that `live` has completed.
        loss, eval_loss, speed: of the last step, of the last evaluation, and in tokens per second; None if
            there is none yet.
    """

    def __init__(
        self,
        step: Step,
        live: TrainState,
        base: Arrays,
        done: int,
        checkpoints: Checkpoints,
        every: int,
        trace: Trace | None = None,
    ) -> None:
        self.live, self.done = live, done
        self.loss: float | None = None
        self.eval_loss: float | None = None
        self.speed: float | None = None
        self._base, self._settings, self._accumulation = base, step.settings, step.accumulation
        self._checkpoints, self._every, self._mesh, self._trace = checkpoints, every, step.mesh, trace
        self._train, self._evaluation = step.jit(), step.jit_evaluation()
        self._gradients = step.jit_gradients()

    def fit(
        self,
        data: TrainingData,
        until: int,
        schedule: Callable[[int], Any],
        metrics: Metrics | Nowhere,
        interrupts: Interrupts,
    ) -> None:
        """Train to step `until`, and save the last step.

        Args:
            schedule: learning rate by optimizer step, counted from 0.

        Raises:
            UserError: the loss or the gradient is not finite, or a checkpoint cannot be written.
            Interrupted: a signal arrived; the current step is finished and saved first.
        """
        report = Report(self.done, until, self._settings.log.every, schedule, metrics)
        if data.evaluation and self.done == 0:
            self._evaluate(data, report)
            report.restart()
        stream = iter(data.batches(self.done))
        interrupts.deferred = True
        try:
            while self.done < until and interrupts.requested is None:
                report.add(self._step(stream))
                last = self.done == until or interrupts.requested is not None
                save = last or self.done % self._every == 0
                evaluate = bool(data.evaluation) and (
                    self.done == until or self.done % self._settings.eval_every == 0
                )
                if save or evaluate or report.due(self.done):
                    report.read()
                if evaluate:
                    self._evaluate(data, report)
                if save:
                    metrics.flush()
                    if self._checkpoints.newest != self.done:
                        self._checkpoints.write(self.done, self.live, data.state(self.done))
                if save or evaluate:
                    report.restart()
            self._checkpoints.finish()
        except NotFinite as error:
            self.close()
            raise error.described(
                self._accumulation, data.origins, kept(self._checkpoints.directory)
            ) from None
        finally:
            interrupts.deferred = False
            report.close()
        if interrupts.requested is not None and self.done < until:
            raise Interrupted(interrupts.requested)
        self.loss, self.speed = report.loss, report.speed

    def close(self) -> None:
        """Wait for a checkpoint that is being written; `fit` has already raised any error from it."""
        with suppress(UserError):
            self._checkpoints.finish()

    def _step(self, stream: Iterator[Batch]) -> Numbers:
        """Run one optimizer step."""
        losses: list[jax.Array] = []
        metrics: list[Named] = []
        tokens = 0
        norm = None
        window = list(itertools.islice(stream, self._accumulation))
        if len(window) < self._accumulation:
            raise UserError(
                f"the training data ended within step {self.done + 1}",
                "its files changed during the run: restore them, and continue with --resume",
            )
        for batch in window:
            tokens += int(np.count_nonzero(batch["segment_ids"]))
            placed = sharding.shard_rows(batch, self._mesh)
            if self._trace is not None and not self._trace.losses:
                self._add_gradients(self._trace, placed)
            self.live, loss, norm, more = self._train(self.live, self._base, placed)
            losses.append(loss)
            metrics.append(more)
        assert norm is not None
        self.done += 1
        if self._trace is not None:
            loss = float(np.mean([float(loss) for loss in losses]))
            self._trace.add(self.done, loss, sum(map(count_targets, window)), window)
        return Numbers(self.done, losses, norm, tokens, metrics)

    def _add_gradients(self, trace: Trace, batch: Batch) -> None:
        """Add a micro-batch's gradients to the trace; a step's gradient is the mean of its micro-batches'."""
        for name, array in self._gradients(self.live[0], self._base, batch).items():
            share = np.asarray(array, np.float32) / self._accumulation
            trace.gradients[name] = trace.gradients.get(name, 0.0) + share

    def _evaluate(self, data: TrainingData, report: Report) -> None:
        """Compute and report the mean loss over the targets of the evaluation data."""
        losses = [
            self._evaluation(self.live[0], self._base, sharding.shard_rows(batch, self._mesh))
            for batch in data.evaluation
        ]
        means = eval_losses([float(loss) for loss in losses], data.eval_parts)
        report.metrics.log("eval", self.done, means)
        report.say(eval_line(self.done, means))
        self.eval_loss = means["loss"]


def new_trace(recipe: str, settings: ModelSettings) -> Trace:
    """Create an empty trace of this backend.

    Args:
        recipe: the artifact's name.
    """
    device = jax.devices()[0]
    about = {"dtype": settings.dtype, "device": device.device_kind, "devices": jax.device_count()}
    return Trace("torchax", recipe, about | {name: version(name) for name in PACKAGES})
