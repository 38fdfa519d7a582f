"""The training loss: next-token cross-entropy over the tokens that carry it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

Batch = dict[str, Any]
"""tokens, positions and segment_ids int32[B, T], loss_mask bool[B, T], norm float32[], index int32[]."""


def attention_mask(segment_ids: jax.Array) -> jax.Array:
    """What each token may attend to: the earlier tokens of its own segment; nothing from padding.

    Args:
        segment_ids: int32[B, T], 0 for padding.

    Returns:
        bool[B, T, T], indexed by row, query and key.
    """
    length = segment_ids.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))
    same = segment_ids[:, :, None] == segment_ids[:, None, :]
    return causal & same & (segment_ids > 0)[:, :, None]


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
    # The argument is named `tokens` in Gemma 4 and `last_tokens` in Gemma 3.
    logits, _ = model(tokens, positions, None, attention_mask(segment_ids))
    within = segment_ids[:, 1:] == segment_ids[:, :-1]
    counted = jnp.pad(loss_mask[:, 1:] & within, ((0, 0), (0, 1)))
    nll = token_nll(logits, jnp.roll(tokens, -1, axis=1))
    total = jnp.where(counted, nll, 0.0).sum()
    return jnp.where(norm > 0, total / jnp.where(norm > 0, norm, 1.0), 0.0)
