"""What layers with a state that is carried from token to token share: the convolution of their inputs, and a
row's division into chunks. A segment starts with zeros, wherever it begins in a row."""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64
"""Tokens of a chunk. Larger chunks cost larger products of [C, C], smaller chunks cost more states."""


def causal_conv(
    x: jax.Array, weight: jax.Array, segment_ids: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """Convolve each channel along the row; a token sees itself and earlier tokens.

    Taps outside of a token's own segment read zeros. Sums are float32.

    Args:
        x: [B, T, D].
        weight: [D, W], the token's own tap last.
        segment_ids: int32[B, T]; tokens of one segment lie together.
        bias: [D], added to each token; None for none.

    Returns:
        An array of x's shape and dtype.
    """
    wide, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    out = wide * weight[:, -1]
    for back in range(1, min(weight.shape[1], x.shape[1])):
        earlier = jnp.pad(wide[:, :-back], ((0, 0), (back, 0), (0, 0)))
        same = jnp.pad(segment_ids[:, back:] == segment_ids[:, :-back], ((0, 0), (back, 0)))
        out += jnp.where(same[..., None], earlier * weight[:, -1 - back], 0)
    if bias is not None:
        out += bias.astype(jnp.float32)
    return out.astype(x.dtype)


def by_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """Reshape [B, T, ...] to [chunks, B, ..., C]; rows are padded with zeros to a multiple of the chunk."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), *((0, 0) for _ in x.shape[2:])))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), (1, 2), (0, -1))


def by_token(x: jax.Array, length: int) -> jax.Array:
    """Reshape [chunks, B, ..., C] to [B, T, ...], without the padding."""
    x = jnp.moveaxis(x, (0, -1), (1, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def decays(g: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return what tokens see of each other in a chunk, and of the state before the chunk.

    Let D_ij = exp(g_j+1 + ... + g_i) if j <= i is in i's segment, else 0. d_i is the same product from the
    chunk's beginning, for the segment that continues into the chunk. A segment border is thus a zero in D
    and d: no exponent is infinite, and no gradient is undefined.

    Args:
        g: float32[chunks, B, K, R, C], the logarithm of the factor by which a state decays, at most 0.
        segment_ids: int32[chunks, B, C].

    Returns:
        D, [chunks, B, K, R, C, C], and d, [chunks, B, K, R, C].
    """
    before = jnp.pad(segment_ids[:-1, :, -1:], ((1, 0), (0, 0), (0, 0)))
    place = jnp.arange(g.shape[-1])
    later = place[:, None] > place
    same = segment_ids[..., :, None] == segment_ids[..., None, :]
    seen = (place[:, None] >= place) & same
    # Summed from j on: a difference of two sums over the chunk would be rounded at the sums' size.
    sums = jnp.cumsum(jnp.where(later, g[..., :, None], 0), axis=-2)
    within = jnp.where(seen[:, :, None, None], jnp.exp(sums), 0)
    carried = jnp.where((segment_ids == before)[:, :, None, None], jnp.exp(jnp.cumsum(g, axis=-1)), 0)
    return within, carried
