"""The losses of preference training: DPO (Rafailov et al. 2023) and ORPO (Hong et al. 2024).

Rows come in pairs: row 2i holds a prompt with the chosen answer, row 2i + 1 the same prompt with the
rejected one; the loss mask covers the answers. Both losses go through Tunix's, pair by pair, and take
from it what each answer is worth. The reference model of DPO is the model without its adapters, as in
TRL with PEFT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from .loss import Batch, Logps

METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")
"""What is logged beside the loss: beta times the log-probability of an answer (in DPO against the
reference's), and how often the chosen one's is the larger."""


class PairValues(NamedTuple):
    """Log-probabilities of the answers of P pairs, or their lengths, [P] each."""

    chosen: jax.Array
    rejected: jax.Array


class Pairs(NamedTuple):
    """A micro-batch of P pairs, and what the model says of it.

    Attributes:
        inputs: its 2 P rows.
        targets: bool[2 P, T], the tokens of the answers.
        logps: float32[2 P, T], of the next token.
        answers: the sums of logps over the targets.
        lengths: of the answers.
        real: bool[P], False where a pair fills the micro-batch up.
        norm: float32[], what the sum over the pairs is divided by.
    """

    inputs: Batch
    targets: jax.Array
    logps: jax.Array
    answers: PairValues
    lengths: PairValues
    real: jax.Array
    norm: jax.Array

    def mean(self, values: jax.Array) -> jax.Array:
        """Of float32[P], one a pair."""
        return jnp.where(self.real, values, 0.0).sum() / self.norm


def preference_loss(
    policy: Logps,
    reference: Logps,
    inputs: Batch,
    objective: str,
    beta: float,
    label_smoothing: float,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a micro-batch of pairs, and its metrics.

    Each pair's loss is divided by `norm`, so that a step's mean is over its pairs. A pair without
    targets, which fills a last batch up, counts for nothing.

    Args:
        policy: the model that is trained.
        reference: the model without adapters, which DPO alone asks.
        inputs: B = 2 P rows; norm is the pairs of the step's micro-batches on average.
        objective: a key of LOSSES.
        beta: of DPO's loss, or the weight of ORPO's odds ratio.
        label_smoothing: of DPO's loss.
    """
    names = ("tokens", "positions", "segment_ids")
    rows = [inputs[name] for name in names]
    targets = _predicted(inputs["loss_mask"], inputs["segment_ids"])
    logps = policy(*rows)
    lengths = _split(targets.sum(-1))
    pairs = Pairs(
        inputs,
        targets,
        logps,
        _answers(logps, targets),
        lengths,
        real=(lengths.chosen > 0) & (lengths.rejected > 0),
        norm=jnp.where(inputs["norm"] > 0, inputs["norm"], 1.0),
    )

    def before() -> PairValues:
        return _answers(jax.lax.stop_gradient(reference(*rows)), targets)

    loss, aux = LOSSES[objective](pairs, before, beta, label_smoothing)
    return loss, {name: pairs.mean(aux[name.replace("_", "/")]) for name in METRICS}


def _dpo(
    pairs: Pairs, reference: Callable[[], PairValues], beta: float, label_smoothing: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    losses, aux = _tunix("dpo", pairs.answers, reference(), beta, label_smoothing)
    return pairs.mean(losses), aux


def _orpo(
    pairs: Pairs, _: Callable[[], PairValues], beta: float, __: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    sums_and_lengths = zip(pairs.answers, pairs.lengths, strict=True)
    average = PairValues(*(sums / jnp.maximum(n, 1) for sums, n in sums_and_lengths))
    _, aux = _tunix("orpo", average, None, beta, 0.0)
    # As in TRL: the chosen text, prompt included, is learnt; the mean is over the micro-batch's tokens.
    segment_ids = pairs.inputs["segment_ids"]
    text = _chosen(_predicted(segment_ids > 0, segment_ids)) & pairs.real[:, None]
    nll = -jnp.where(text, _chosen(pairs.logps), 0.0).sum() / jnp.maximum(text.sum(), 1)
    return nll * pairs.real.sum() / pairs.norm + beta * pairs.mean(aux["or_loss"]), aux


LOSSES = {"dpo": _dpo, "orpo": _orpo}
"""By objective: the loss of a micro-batch, float32[], and Tunix's metrics of each pair, float32[P]."""


def _predicted(mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """bool[B, T]: whether the token after each one is masked and of the same text."""
    within = segment_ids[:, 1:] == segment_ids[:, :-1]
    return jnp.pad(mask[:, 1:] & within, ((0, 0), (0, 1)))


def _answers(logps: jax.Array, targets: jax.Array) -> PairValues:
    """The sums of log-probabilities over each row's targets."""
    return _split(jnp.where(targets, logps, 0.0).sum(-1))


def _split(values: jax.Array) -> PairValues:
    return PairValues(_chosen(values), values[1::2])


def _chosen(values: jax.Array) -> jax.Array:
    return values[0::2]


def _tunix(
    algorithm: str, answers: PairValues, reference: PairValues | None, beta: float, label_smoothing: float
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Tunix's loss and metrics of each pair, float32[P], from log-probabilities computed here.

    Tunix's own come from the whole logits, and its ORPO takes sums where the paper and TRL take means
    over an answer's tokens; so that is what it is given.
    """
    from tunix.sft.dpo import dpo_trainer

    def one(chosen: jax.Array, rejected: jax.Array, before: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        example = dpo_trainer.TrainExample(
            input_ids=None,
            positions=None,
            attention_mask=None,
            ref_chosen_logps=None if before is None else before.chosen[None],
            ref_rejected_logps=None if before is None else before.rejected[None],
            completion_mask=jnp.ones((2, 1)),
            logits_to_keep=1,
        )
        given = (chosen[None], rejected[None])
        with mock.patch.object(dpo_trainer, "compute_logps", lambda *_, **__: given):
            return dpo_trainer.dpo_loss_fn(
                None,
                example,
                algorithm=algorithm,
                beta=beta,
                lambda_orpo=beta,
                label_smoothing=label_smoothing,
            )

    return jax.vmap(one)(answers.chosen, answers.rejected, reference)
