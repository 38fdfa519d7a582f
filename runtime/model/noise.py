"""NEFTune: noise on the embeddings of a training step (Jain et al. 2023), as transformers adds it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from .forward import Forward
from .initial import path_hash
from .lora import random_bits


def noisy_embeddings(forward: Forward, alpha: float, salts: jax.Array) -> AbstractContextManager[Any]:
    """Add noise, uniform within alpha / sqrt(T * D), to embeddings [B, T, D] that are traced in this context.

    Args:
        forward: how the model is computed.
        alpha: the paper's alpha. Padding counts among the T tokens of a row.
        salts: uint32[B], from `lora.row_salts`.
    """
    embedder: Any = forward.family.tunix_module().Embedder
    encode = embedder.encode
    # transformers' embedding scales its own output in some families; the decoder here scales it afterwards.
    a: Any = forward.architecture
    later = a.embedding_scale if forward.family.scaled_embedding else 1.0

    def encoded(self: Any, tokens: jax.Array) -> jax.Array:
        x = encode(self, tokens)
        bound = alpha / (x.shape[1] * x.shape[2]) ** 0.5 / later
        bits = random_bits(salts ^ jnp.uint32(path_hash("embed_tokens")), x.shape)
        uniform = (bits >> 8).astype(jnp.float32) * (2.0**-23) - 1.0
        return x + (uniform * bound).astype(x.dtype)

    return mock.patch.object(embedder, "encode", encoded)
