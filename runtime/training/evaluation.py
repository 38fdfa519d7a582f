"""Evaluate the model of a run while it trains: the loss of the evaluation data, and greedy answers to prompts
(train.generations), on the run's mesh.

No KV cache is kept for answers: each new token runs the forward pass over the whole rows again. An answer of
N tokens costs N forward passes, and the code that computes them is the training code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ..data.batches import TrainingData, eval_line, eval_losses
from ..data.prompts import Prompts
from ..metrics.run_report import Report
from ..model.attention import collect, deal
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

    def run(self, step: int) -> float:
        """Return the mean loss over the evaluation data's targets."""
        losses = [self._loss_of(batch) for batch in self._data.evaluation]
        means = eval_losses([float(loss) for loss in losses], self._data.eval_parts)
        loss = self.record(step, means)
        if self._data.prompts is not None:
            self._report.metrics.samples(step, self._answers(self._data.prompts))
        return loss

    def record(self, step: int, losses: Mapping[str, float]) -> float:
        """Write and print an evaluation, and return its loss."""
        self._report.metrics.log("eval", step, losses)
        self._report.say(eval_line(step, losses))
        return losses["loss"]

    def count(self, step: int, loss: float) -> bool:
        """Count an evaluation, and return whether its loss is the lowest so far."""
        if step % self._every:
            return False
        self._counts = self._counts.after(step, loss, self._stopping.min_delta if self._stopping else 0.0)
        best = self._counts.step == step
        if best and self._kept is not None:
            self._kept.best = step
        return best

    def sentence(self, step: int) -> str:
        """Say why a run stopped early after a step."""
        return self._counts.sentence(step)


Answer = Callable[[Any, Any, dict[str, jax.Array]], tuple[jax.Array, jax.Array]]
"""(trained, base, {tokens int32[B, T], lengths int32[B]}) -> both, with the answers behind the prompts."""


def jit_answers(
    forward: Forward, merge: Callable[[Any, Any], Any], mesh: Any, most: int, ends: Sequence[int]
) -> Answer:
    """Compile the loop that appends one token to each row, until `most` tokens or until all rows have ended.

    Args:
        merge: builds the model from its trained arrays and its other arrays.
        mesh: in scope while the loop is traced.
        most: the largest number of tokens of an answer.
        ends: tokens that end an answer; such a token is the answer's last.
    """
    stops = jnp.asarray(ends, jnp.int32)

    def next_tokens(model: Any, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        rows = (tokens, places, (places < lengths[:, None]).astype(jnp.int32))
        hidden = forward.hidden(model, *(map(deal, rows) if forward.dealt else rows))
        if forward.dealt:
            hidden = collect(hidden, tokens.shape[1])
        newest = jnp.take_along_axis(hidden, jnp.maximum(lengths - 1, 0)[:, None, None], axis=1)
        head = forward.head(model)
        return jnp.argmax(head.logits(newest, *head.placed(head.arrays))[:, 0], axis=-1).astype(jnp.int32)

    def answer(trained: Any, base: Any, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tokens, lengths = batch["tokens"], batch["lengths"]
        rows = jnp.arange(len(tokens))

        def goes_on(state: tuple[jax.Array, ...]) -> jax.Array:
            _, _, ended, count = state
            return (count < most) & ~ended.all()

        def write(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            tokens, lengths, ended, count = state
            new = next_tokens(merge(trained, base), tokens, lengths)
            tokens = tokens.at[rows, lengths].set(jnp.where(ended, tokens[rows, lengths], new))
            lengths = lengths + ~ended
            return tokens, lengths, ended | (new[:, None] == stops).any(1), count + 1

        state = (tokens, lengths, lengths == 0, jnp.int32(0))
        tokens, lengths, _, _ = jax.lax.while_loop(goes_on, write, state)
        return tokens, lengths

    whole = NamedSharding(mesh, PartitionSpec())
    return jax.jit(answer, out_shardings=(whole, whole))


def answered(
    answer: Callable[[dict[str, jax.Array]], tuple[jax.Array, jax.Array]], prompts: Prompts, rows: Rows
) -> list[dict[str, Any]]:
    """Return the answers to all prompts, in the form that generations.jsonl stores.

    Args:
        answer: the compiled loop, with the model's current weights.
        rows: the rows of a micro-batch, computed at once; each process places its own.
    """
    out = []
    for start in range(0, len(prompts.texts), rows.total):
        chosen = [start + row for row in rows.here if start + row < len(prompts.texts)]
        tokens = np.zeros((len(rows.here), prompts.tokens.shape[1]), np.int32)
        lengths = np.zeros(len(rows.here), np.int32)
        tokens[: len(chosen)], lengths[: len(chosen)] = prompts.tokens[chosen], prompts.lengths[chosen]
        completed, ends = map(np.asarray, answer(rows.place({"tokens": tokens, "lengths": lengths})))
        for row in range(min(rows.total, len(prompts.texts) - start)):
            written = completed[row, prompts.lengths[start + row] : ends[row]].tolist()
            out.append(
                {
                    "prompt": prompts.texts[start + row],
                    "answer": prompts.decode(written),
                    "tokens": len(written),
                    "ended": bool(written) and written[-1] in prompts.ends,
                }
            )
    return out
