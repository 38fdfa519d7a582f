"""NEFTune: noise on the embeddings of a training step (Jain et al. 2023), as transformers adds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from .initial import path_hash
from .lora import random_bits

_noise: ContextVar[tuple[float, jax.Array, float] | None] = ContextVar("noise", default=None)


@contextmanager
def noisy_embeddings(alpha: float, salts: jax.Array, scale: float) -> Iterator[None]:
    """Add noise, uniform within alpha / sqrt(T * D), to embeddings [B, T, D] that are traced in this context.

    Args:
        alpha: the paper's alpha. Padding counts among the T tokens of a row.
        salts: uint32[B], from `lora.row_salts`.
        scale: by which the model multiplies its embeddings after this, and transformers' model before it.
    """
    token = _noise.set((alpha, salts, scale))
    try:
        yield
    finally:
        _noise.reset(token)


def with_noise(x: jax.Array) -> jax.Array:
    """Add the noise of the context, if there is any, to embeddings [B, T, D]."""
    noise = _noise.get()
    if noise is None:
        return x
    alpha, salts, scale = noise
    bound = alpha / (x.shape[1] * x.shape[2]) ** 0.5 / scale
    bits = random_bits(salts ^ jnp.uint32(path_hash("embed_tokens")), x.shape)
    uniform = (bits >> 8).astype(jnp.float32) * (2.0**-23) - 1.0
    return x + (uniform * bound).astype(x.dtype)
