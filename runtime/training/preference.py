"""The losses of preference training for JAX: pairs of answers, with the table of pair_losses.py.

Rows come in pairs: row 2i holds a prompt with the chosen answer, row 2i + 1 the same prompt with the rejected
one. The loss mask covers the answers. The reference model is the model that training starts from: the base
without adapters if they are fresh, else a copy of the adapters of lora.start_from, as in TRL with PEFT.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ..settings import TrainSettings
from .logps import Logps
from .loss import Batch, predicted
from .objectives import OBJECTIVES
from .pair_losses import Functions, pair_loss

METRICS = ("rewards_chosen", "rewards_rejected", "rewards_margin", "rewards_accuracy")
"""Metrics that are logged with the loss: beta times the log-probability of an answer (minus the reference's,
if there is a reference; else its mean over tokens, if the loss uses the mean), and how often the chosen
answer's value is the larger one."""

FUNCTIONS = Functions(jnp.exp, jnp.log1p, jax.nn.relu, jax.nn.sigmoid, jax.nn.log_sigmoid)


def preference_loss(
    policy: Logps, reference: Logps, inputs: Batch, train: TrainSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a micro-batch of pairs, and its metrics.

    Each pair's loss is divided by `norm`, so that a step's mean is over its pairs. A pair without targets,
    which fills up a last batch, does not count.

    Args:
        policy: the model that is trained.
        reference: the model that training started from; it runs only if the objective has a reference.
        inputs: B = 2 P rows; norm is the average number of pairs in the step's micro-batches.
        train: settings whose objective takes pairs.
    """
    objective, loss = OBJECTIVES[train.objective], pair_loss(train)
    compared = objective.refers(train.loss_type)
    rows = [inputs[name] for name in ("tokens", "positions", "segment_ids")]
    targets = predicted(inputs["loss_mask"], inputs["segment_ids"])
    lengths = targets.sum(-1)
    real = (lengths.reshape(-1, 2) > 0).all(1)
    norm = jnp.where(inputs["norm"] > 0, inputs["norm"], 1.0)

    def mean(values: jax.Array) -> jax.Array:
        """Average float32[P], one value per pair."""
        return jnp.where(real, values, 0.0).sum() / norm

    logps = policy(*rows)
    sums = summed(logps, targets)
    if compared:
        sums -= summed(jax.lax.stop_gradient(reference(*rows)), targets)
    worth = sums / jnp.maximum(lengths, 1) if loss.mean else sums
    total = mean(loss.of(FUNCTIONS, worth[0::2], worth[1::2], train))
    if objective.likelihood:
        # As in TRL, the mean is over the micro-batch's tokens.
        segment_ids = inputs["segment_ids"]
        learned = targets if objective.likelihood == "answer" else predicted(segment_ids > 0, segment_ids)
        learned = learned[0::2] & real[:, None]
        nll = -summed(logps[0::2], learned).sum() / jnp.maximum(learned.sum(), 1)
        total += train.cpo_alpha * nll * real.sum() / norm
    rewards = train.beta * (sums if compared else worth)
    chosen, rejected = rewards[0::2], rewards[1::2]
    accuracy = (chosen > rejected).astype(jnp.float32)
    values = (chosen, rejected, chosen - rejected, accuracy)
    return total, {name: mean(value) for name, value in zip(METRICS, values, strict=True)}


def summed(logps: jax.Array, targets: jax.Array) -> jax.Array:
    """Return float32[B]: the log-probabilities of each row's targets, summed."""
    return jnp.where(targets, logps, 0.0).sum(-1)
