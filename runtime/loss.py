"""The training loss: next-token cross-entropy over the tokens that carry it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from runtime.forward import Forward

Batch = dict[str, Any]
"""tokens, positions and segment_ids int32[B, T], loss_mask bool[B, T], norm float32[], index int32[]."""


def token_nll(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Negative log-likelihood of each target in float32: logsumexp minus the target's logit.

    The logit is picked by comparing with an iota, which needs neither a one-hot array nor a gather
    over a vocabulary that is split over devices.

    Args:
        logits: [B, T, V].
        targets: int32[B, T].
    """
    logits = logits.astype(jnp.float32)
    vocabulary = jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2)
    chosen = jnp.where(vocabulary == targets[..., None], logits, 0.0).sum(-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def batch_loss(
    forward: Forward,
    model: Any,
    tokens: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    loss_mask: jax.Array,
    norm: jax.Array,
) -> jax.Array:
    """Summed negative log-likelihood of a micro-batch's targets, divided by `norm`.

    Token t is predicted at t - 1, and only from within its own segment. A micro-batch without targets
    has loss 0.
    """
    logits = forward.logits(model, tokens, positions, segment_ids)
    within = segment_ids[:, 1:] == segment_ids[:, :-1]
    counted = jnp.pad(loss_mask[:, 1:] & within, ((0, 0), (0, 1)))
    nll = token_nll(logits, jnp.roll(tokens, -1, axis=1))
    total = jnp.where(counted, nll, 0.0).sum()
    return jnp.where(norm > 0, total / jnp.where(norm > 0, norm, 1.0), 0.0)
