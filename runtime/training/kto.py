"""The loss of single answers, each desirable or not, for JAX: by unpaired.py, as TRL's KTOTrainer has it.

A row holds a prompt with an answer, and the loss mask covers the answer. The reference model is the one that
training starts from: of adapters the model without them, as in TRL with PEFT.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..settings import TrainSettings
from .loss import Batch, Logps
from .objectives import OBJECTIVES
from .preference import predicted, summed
from .unpaired import losses, mismatched

METRICS = ("kl", "rewards_chosen", "rewards_rejected", "rewards_margin")
"""What is logged beside the loss: the estimated distance from the reference, in nats an answer, and beta
times the log-probability of an answer less the reference's, a mean over a step's desirable answers and one
over the others; 0 of a step that has none."""


def kto_loss(
    policy: Logps, still: Logps, reference: Logps, inputs: Batch, train: TrainSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of a micro-batch of answers, and its metrics.

    Each answer's loss is divided by `norm`, so that a step's mean is over its answers. A row without targets,
    which fills a last batch up, counts for nothing. The distance from the reference is a mean over the whole
    micro-batch, as TRL takes it over its processes, and has no gradient.

    Args:
        policy: the model that is trained.
        still: the same without a gradient.
        reference: the model that training started from.
        inputs: with `desirable` float32[B], above 0 of desirable answers, below 0 of others and 0 of rows
            without any; its size is the answer's share of its kind's metrics.
        train: its objective has single answers.
    """

    def gains_of(model: Logps, rows: Any) -> tuple[jax.Array, jax.Array]:
        """float32[B] of the answers' log-probabilities less the reference's, and which rows have any."""
        found = [rows[name] for name in ("tokens", "positions", "segment_ids")]
        targets = predicted(rows["loss_mask"], rows["segment_ids"])
        before = jax.lax.stop_gradient(summed(reference(*found), targets))
        return summed(model(*found), targets) - before, targets.any(1)

    gains, real = gains_of(policy, inputs)
    kl = jnp.float32(0)
    if train.loss_type in OBJECTIVES[train.objective].mismatched:
        others, some = gains_of(still, mismatched(jnp, inputs, train.micro_batch_size))
        distance = jnp.where(some, others, 0.0).sum() / jnp.maximum(some.sum(), 1)
        kl = jnp.maximum(jax.lax.stop_gradient(distance), 0.0)
    sides, shares = jnp.sign(inputs["desirable"]), jnp.abs(inputs["desirable"])
    norm = jnp.where(inputs["norm"] > 0, inputs["norm"], 1.0)
    each = losses(jax.nn.sigmoid, gains, sides, kl, train)
    total = jnp.where(real, each, 0.0).sum() / norm
    rewards = train.beta * shares * jnp.where(real, gains, 0.0)
    chosen, rejected = (jnp.where(sides == side, rewards, 0.0).sum() for side in (1, -1))
    return total, dict(zip(METRICS, (kl, chosen, rejected, chosen - rejected), strict=True))
