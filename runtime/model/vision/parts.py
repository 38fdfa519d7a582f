"""Attention among the patches of pictures."""

from __future__ import annotations

import functools
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from .. import sharding
from ..attention import Scoring, attend_by_scores, splash
from ..sharding import mesh_in_scope, on_tpu

SCORES_BYTES = 256 * 2**20
"""The most bytes of float32 scores that a device holds at once: attention takes so many queries at a time. A
picture of 4,096 patches has 1 GiB of them with 16 heads."""

MOST_WINDOWS = 1024
"""More windows than a picture has in its height or its width."""


def attend(q: jax.Array, k: jax.Array, v: jax.Array, groups: jax.Array | None, scale: float) -> jax.Array:
    """Compute attention of patches in both directions: on a TPU by the splash kernel, elsewhere from the
    scores of some queries at a time.

    Args:
        q: [B, P, N, H].
        k, v: [B, P, K, H], K dividing N.
        groups: int32[B, P, G]: patches see those with the same G numbers; None if all of a row see each
            other.
        scale: factor of the scores.

    Returns:
        [B, P, N, H] in q's dtype.
    """
    rows, patches, heads, _ = q.shape
    mesh = mesh_in_scope()
    if on_tpu(mesh):
        return by_kernel(q, k, v, groups, scale, mesh)
    ids = jnp.zeros((rows, patches, 1), jnp.int32) if groups is None else groups
    on_device = rows // sharding.row_parts(rows) * heads // sharding.parts(heads, "tp")
    least = -(-4 * on_device * patches * patches // SCORES_BYTES)
    count = next(n for n in range(min(max(1, least), patches), patches + 1) if patches % n == 0)
    some = partial(_attend, k=k, v=v, key_ids=ids, scale=scale)
    if count == 1:
        return some((q, ids))

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(rows, count, patches // count, *x.shape[2:]), 1, 0)

    # If the tower is trained, the backward pass computes the scores again, piece by piece.
    out = jnp.moveaxis(jax.lax.map(jax.checkpoint(some), (split(q), split(ids))), 0, 1)
    return out.reshape(rows, patches, heads, v.shape[-1])


def by_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, groups: jax.Array | None, scale: float, mesh: Mesh | None
) -> jax.Array:
    """Compute `attend` by the splash kernel, which holds no scores. The arguments are the same."""
    if groups is None:
        ids = jnp.ones(q.shape[:2], jnp.int32)
    else:
        ids = functools.reduce(lambda ids, more: ids * MOST_WINDOWS + more, jnp.moveaxis(groups, -1, 0))
    return splash(q * scale, k, v, ids, Scoring(causal=False), mesh)


def _attend(
    part: tuple[jax.Array, jax.Array], k: jax.Array, v: jax.Array, key_ids: jax.Array, scale: float
) -> jax.Array:
    """Compute the attention of some queries, which come with their groups."""
    q, ids = part
    seen = jnp.all(ids[:, :, None] == key_ids[:, None], axis=-1)
    return attend_by_scores(q, k, v, seen, scale, Scoring())
