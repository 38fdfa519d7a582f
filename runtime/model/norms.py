"""Normalization in float32, where Tunix's own is done in the model's dtype."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def offset_rms_norm(self: Any, x: jax.Array) -> jax.Array:
    """Replace RMSNorm.__call__ of Tunix's Gemma 2 and 3: x / rms(x) * (1 + scale), as in transformers.

    In bfloat16, 1 + scale would lose the part of scale below 2^-8.

    Args:
        self: Tunix's module, with `scale` of [D].
        x: [..., D].

    Returns:
        An array of x's shape and dtype.
    """
    wide = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
    scale = 1.0 + self.scale.value.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(variance + 1e-6) * scale).astype(x.dtype)
