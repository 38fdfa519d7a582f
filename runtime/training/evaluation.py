"""Evaluate the model of a run while it trains: the loss of the evaluation data, or rewards of its own
completions of it, and greedy answers to prompts (train.generations), on the run's mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ..data.batches import TrainingData, eval_line, eval_losses
from ..data.prompts import Prompts
from ..metrics.loggers import LOSS, REWARD
from ..metrics.run_report import Report
from ..model.decode import Completions, Generation, jit_generate, right_padded
from ..model.forward import Forward
from ..model.sharding import Rows
from ..settings import TrainSettings
from .early_stopping import Evaluations

if TYPE_CHECKING:
    from ..checkpoints.saving import Preserved


class Evaluating:
    """The evaluations of a run.

    Args:
        loss_of: computes the loss of an evaluation batch, of the current model.
        answers: returns that model's answers to prompts.
        data: with evaluation batches.
        report: takes the results.
        counted: the state when the run continues; None at its beginning.
        kept: which checkpoints are kept, if the best one is always among them.
    """

    def __init__(
        self,
        loss_of: Callable[[Any], Any],
        answers: Callable[[Prompts], list[dict[str, Any]]],
        data: TrainingData,
        report: Report,
        settings: TrainSettings,
        counted: Mapping[str, Any] | None,
        kept: Preserved | None,
    ) -> None:
        self._loss_of, self._answers, self._data, self._report = loss_of, answers, data, report
        self._criterion = LOSS if data.evaluate is None else REWARD
        self._every, self._stopping = settings.eval_every, settings.early_stopping
        self._counts, self._kept = Evaluations(**(counted or {})), kept
        if kept is not None:
            kept.best = self._counts.step

    @property
    def state(self) -> dict[str, Any]:
        """Return the counts, for the run's checkpoints."""
        return asdict(self._counts)

    @property
    def ends(self) -> bool:
        """Return whether the run should stop early."""
        return self._counts.ends(self._stopping)

    def run(self, step: int) -> Mapping[str, float]:
        """Evaluate, write and print, and return the numbers: the mean loss over the evaluation data's targets
        as `loss`, or the mean reward of its completions as `reward`, and more; {} without evaluation data.

        Raises:
            UserError: a reward fails.
        """
        numbers: Mapping[str, float] = {}
        if self._data.evaluate is not None:
            numbers = self.record(step, self._data.evaluate(step))
        elif self._data.evaluation:
            losses = [self._loss_of(batch) for batch in self._data.evaluation]
            means = eval_losses([float(loss) for loss in losses], self._data.eval_parts)
            numbers = self.record(step, means)
        if self._data.prompts is not None:
            self._report.metrics.samples(step, self._answers(self._data.prompts))
        return numbers

    def record(self, step: int, numbers: Mapping[str, float]) -> Mapping[str, float]:
        """Write and print an evaluation, and return its numbers."""
        self._report.metrics.log("eval", step, numbers)
        self._report.say(eval_line(step, numbers) if LOSS.key in numbers else reward_line(step, numbers))
        return numbers

    def count(self, step: int, numbers: Mapping[str, float]) -> bool:
        """Count an evaluation, and return whether it is the best so far."""
        value = numbers.get(self._criterion.key)
        if step % self._every or value is None:
            return False
        least = self._stopping.min_delta if self._stopping else 0.0
        self._counts = self._counts.after(step, self._criterion.cost(value), least)
        best = self._counts.step == step
        if best and self._kept is not None:
            self._kept.best = step
        return best

    def sentence(self, step: int) -> str:
        """Say why a run stopped early after a step."""
        return self._counts.sentence(step, self._criterion)


def reward_line(step: int, numbers: Mapping[str, float]) -> str:
    """Return the line that a run prints for an evaluation of rewards."""
    shown = {name: value for name, value in numbers.items() if name.startswith("reward/") or "/" not in name}
    others = ", ".join(f"{name} {value:.4g}" for name, value in shown.items() if name != REWARD.key)
    return f"step {step}: {REWARD.name} {numbers[REWARD.key]:.4f}" + (f" ({others})" if others else "")


Answer = Callable[[Any, Any, Mapping[str, Any]], Completions]
"""(trained, base, prompts of decode.py) -> the greedy answers."""


def jit_answers(forward: Forward, merge: Callable[[Any, Any], Any], mesh: Any, prompts: Prompts) -> Answer:
    """Compile the program that answers a micro-batch of prompts.

    Args:
        merge: builds the model from its trained arrays and its other arrays.
        mesh: in scope while the program is traced.
        prompts: of which the program has the number of tokens, the ends and the padded length.
    """
    generation = Generation(prompts.most, prompts.ends, longest=prompts.tokens.shape[1])
    return jit_generate(forward, merge, mesh, generation)


def answered(
    answer: Callable[[dict[str, jax.Array]], Completions], prompts: Prompts, rows: Rows
) -> list[dict[str, Any]]:
    """Return the answers to all prompts, in the form that generations.jsonl stores.

    Args:
        answer: the compiled program, with the model's current weights.
        rows: the rows of a micro-batch, computed at once; each process places its own.
    """
    out = []
    width = prompts.tokens.shape[1] - prompts.most  # answers are as many tokens of the padded length
    for start in range(0, len(prompts.texts), rows.total):
        chosen = [start + row for row in rows.here if start + row < len(prompts.texts)]
        tokens = np.zeros((len(rows.here), width), np.int32)
        lengths = np.zeros(len(rows.here), np.int32)
        tokens[: len(chosen)], lengths[: len(chosen)] = (
            prompts.tokens[chosen, :width],
            prompts.lengths[chosen],
        )
        written = Completions(*map(np.asarray, answer(rows.place(right_padded(tokens, lengths)))))
        for row in range(min(rows.total, len(prompts.texts) - start)):
            new = written.tokens[row, : written.lengths[row]].tolist()
            out.append(
                {
                    "prompt": prompts.texts[start + row],
                    "answer": prompts.decode(new),
                    "tokens": len(new),
                    "ended": bool(written.ended[row]),
                }
            )
    return out
