"""The loss of single answers, each desirable or not, for JAX, as TRL's KTOTrainer computes it (unpaired.py).

A row holds a prompt with an answer, and the loss mask covers the answer. The reference model is the model
that training starts from. With adapters it is the base without them, as in TRL with PEFT.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..settings import TrainSettings
from .logps import Logps
from .loss import Batch, predicted
from .objectives import OBJECTIVES
from .preference import summed
from .unpaired import losses, mismatched

METRICS = ("kl", "rewards_chosen", "rewards_rejected", "rewards_margin")
"""Metrics that are logged with the loss: the estimated distance from the reference, in nats an answer; beta
times the log-probability of an answer minus the reference's, as the mean over a step's desirable answers
and as the mean over its undesirable ones. A mean is 0 if the step has no answer of that kind."""


def kto_loss(
    policy: Logps, still: Logps, reference: Logps, inputs: Batch, train: TrainSettings
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss of a micro-batch of answers, and its metrics.

    Each answer's loss is divided by `norm`, so that a step's mean is over its answers. A row without targets,
    which fills up a last batch, does not count. The distance from the reference is a mean over the whole
    micro-batch, as TRL averages it over its processes, and has no gradient.

    Args:
        policy: the model that is trained.
        still: the same model without a gradient.
        reference: the model that training started from.
        inputs: includes `desirable` float32[B], above 0 for desirable answers, below 0 for undesirable
            ones and 0 for rows without an answer; its size is the answer's share of its kind's metrics.
        train: settings whose objective takes single answers.
    """

    def gains_of(model: Logps, rows: Any) -> tuple[jax.Array, jax.Array]:
        """Return float32[B], log-probabilities minus the reference's, and which rows have an answer."""
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
