"""The parts that vision towers are made of."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .. import sharding
from ..families.description import Norm
from ..layers import Einsum, Normalization

PATCHES = ("fsdp", None, "tp")
"""The sharding of a tower's stream [B, P, D], by rows or pictures, and of features within its blocks."""
HEADS = ("fsdp", None, "tp", None)
"""The sharding of queries, keys and values [B, P, N, H]."""

SCORES_BYTES = 256 * 2**20
"""The most bytes of float32 scores that a device holds at once: attention takes so many queries at a time. A
picture of 4,096 patches has 1 GiB of them with 16 heads."""


def dense(features_in: int, features_out: int, dtype: Any, bias: bool = True) -> Einsum:
    """Return a linear layer on [B, P, features_in]."""
    return Einsum("BPI,IO->BPO", (features_in, features_out), dtype, "kernel", int(bias))


def layer_norm(size: int, eps: float, dtype: Any) -> Normalization:
    """Return a layer norm as torch's, which computes in float32."""
    return Normalization(Norm(eps, centered=True, bias=True, wide=True), (size,), dtype)


def split_heads(x: jax.Array, heads: int) -> jax.Array:
    """Return [B, P, N, H] of [B, P, N * H]."""
    return sharding.constrain(x.reshape(*x.shape[:2], heads, -1), HEADS)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array | None, scale: float) -> jax.Array:
    """Compute attention of patches in both directions, some queries at a time.

    Args:
        q, k, v: [B, P, N, H]. Values may have another width.
        ids: int32[B, P]: patches see those with the same number; None if all of a row see each other.
        scale: factor of the scores.

    Returns:
        [B, P, N, H] in q's dtype.
    """
    rows, patches, heads, _ = q.shape
    on_device = rows // sharding.row_parts(rows) * heads // sharding.parts(heads, "tp")
    least = -(-4 * on_device * patches * patches // SCORES_BYTES)
    count = next(n for n in range(min(max(1, least), patches), patches + 1) if patches % n == 0)
    if count == 1:
        return _attend(q, ids, k, v, ids, scale)
    size = patches // count

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(rows, count, size, *x.shape[2:]), 1, 0)

    some = partial(_attend, k=k, v=v, key_ids=ids, scale=scale)
    if ids is None:
        out = jax.lax.map(lambda q: some(q, None), split(q))
    else:
        out = jax.lax.map(lambda both: some(*both), (split(q), split(ids)))
    return jnp.moveaxis(out, 0, 1).reshape(rows, patches, heads, v.shape[-1])


def _attend(
    q: jax.Array,
    ids: jax.Array | None,
    k: jax.Array,
    v: jax.Array,
    key_ids: jax.Array | None,
    scale: float,
) -> jax.Array:
    scores = jnp.einsum("BTNH,BSNH->BNTS", q, k) * jnp.asarray(scale, q.dtype)
    if ids is not None and key_ids is not None:
        same = ids[:, None, :, None] == key_ids[:, None, None, :]
        scores = jnp.where(same, scores, jnp.finfo(scores.dtype).min)
    weights = jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(v.dtype)
    return jnp.einsum("BNTS,BSNH->BTNH", weights, v)
