"""The log-probabilities of tokens, which the losses of answers are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .loss import Arrays, Asked, Chunks, Computed, chunk_logits, dealt, predicted, token_nll

Logps = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
"""(tokens, positions, segment_ids) -> the log-probability of each next token: `token_logps` of some model."""


def logps_of(asked: Asked) -> Logps:
    """Return the log-probabilities of a model that answers."""
    return lambda *rows: asked(lambda forward, model: token_logps(forward, model, *rows))


def token_logps(
    forward: Computed, model: Any, tokens: jax.Array, positions: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Compute the log-probability of each next token.

    Returns:
        float32[B, T]: at t the log-probability of tokens[:, t + 1] given the earlier tokens of its
            segment; 0 at the last position and where a segment or the row's tokens end.
    """
    rows = (tokens, positions, segment_ids, jnp.roll(tokens, -1, axis=1))
    *inputs, targets = dealt(rows) if forward.dealt else rows
    hidden = forward.hidden(model, *inputs)
    head = forward.head(model)
    chunks = Chunks.of(hidden.shape, head.vocab_size)
    dtype = head.weight.dtype
    # In float32, so that the gradients of a trained head are summed over chunks in float32.
    arrays = tuple(array.astype(jnp.float32) for array in head.placed(head.arrays))

    # prevent_cse is off: a scan's iterations share nothing that recomputing could be merged with.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def nll_of(own: Arrays, x: jax.Array, targets: jax.Array) -> jax.Array:
        return token_nll(chunk_logits(head, tuple(array.astype(dtype) for array in own), x), targets)

    def body(_: None, xs: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        return None, nll_of(arrays, *xs)

    _, nll = jax.lax.scan(body, None, chunks.split(hidden, targets))
    nll = chunks.join(nll)
    if forward.dealt:
        from ..model.context import collect

        nll = collect(nll, tokens.shape[1])
    return jnp.where(predicted(segment_ids > 0, segment_ids), -nll, 0.0)
