"""Gated delta nets: linear attention over packed rows, with a state that decays and is corrected.

A head updates its state S of [Dk, Dv] at each token of the row (Yang, Kautz and Hatamizadeh 2024,
arXiv 2412.06464, equation 10, which has S transposed):

    S <- exp(g) S
    S <- S + k (beta (v - S^T k))^T
    o = S^T q

A segment starts with S = 0, wherever it begins in a row.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers
from .families.description import Norm
from .layers import HEADS, STREAM, Block, Config, Einsum, Normalization
from .sharding import constrain
from .states import CHUNK, by_chunk, by_token, causal_conv, decays

NORM_EPS = 1e-6
"""Added to the squared length of queries and keys, as in transformers."""


class DeltaNet(Block):
    """The gated delta net of one layer."""

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture, config.dtype
        assert a.delta is not None
        self.config = config
        d, n, h, channels = a.hidden_size, a.delta.value_heads, a.delta.value_dim, a.delta.features
        for name, features in a.delta_projections.items():
            flat = len(features) == 1
            equation, weight = ("BTI,IO->BTO", "kernel") if flat else ("BTD,DNH->BTNH", "w")
            setattr(self, name, Einsum(equation, (d, *features), dtype, weight))
        self.conv1d = nnx.Param(jnp.zeros((channels, a.delta.taps), dtype))
        self.A_log, self.dt_bias = (nnx.Param(jnp.zeros(n, dtype)) for _ in range(2))
        self.norm = Normalization(Norm(a.norm.eps), (h,), dtype)
        self.out_proj = Einsum("BTNH,NHD->BTD", (n, h, d), dtype)

    def block(self, x: jax.Array, *_: Any) -> jax.Array:
        mixed, z, b, a = self.projected(x)
        q, k, v = self.convolved(mixed)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        wide = a.astype(jnp.float32) + self.dt_bias.get_value().astype(jnp.float32)
        decay = -jnp.exp(self.A_log.get_value().astype(jnp.float32)) * jax.nn.softplus(wide)
        out = self.norm(gated_delta_rule(q, k, v, decay, beta, layers.segments()))
        gate = jax.nn.silu(constrain(z, HEADS).astype(jnp.float32))
        return constrain(self.out_proj((out.astype(jnp.float32) * gate).astype(x.dtype)), STREAM)

    def projected(self, x: jax.Array) -> tuple[jax.Array, ...]:
        """Return queries, keys and values concatenated as [B, T, C], gates [B, T, N, Dv], and the inputs of
        beta and decay, [B, T, N] each."""
        description = self.config.architecture
        delta = description.delta
        assert delta is not None
        if "delta" not in description.fused:
            return self.in_proj_qkv(x), self.in_proj_z(x), self.in_proj_b(x), self.in_proj_a(x)
        q, k, v, z = jnp.split(self.in_proj_qkvz(x), list(accumulate(delta.of_key_head[:-1])), axis=-1)
        b, a = jnp.split(self.in_proj_ba(x), 2, axis=-1)
        q, k, v, b, a = (one.reshape(*x.shape[:2], -1) for one in (q, k, v, b, a))
        return jnp.concatenate((q, k, v), axis=-1), z.reshape(*x.shape[:2], -1, delta.value_dim), b, a

    def convolved(self, mixed: jax.Array) -> tuple[jax.Array, ...]:
        """Convolve and split: queries and keys [B, T, K, Dk], values [B, T, N, Dv]."""
        delta = self.config.architecture.delta
        assert delta is not None
        mixed = jax.nn.silu(causal_conv(mixed, self.conv1d.get_value(), layers.segments()))
        keys = delta.key_heads * delta.key_dim
        q, k, v = jnp.split(mixed, (keys, 2 * keys), axis=-1)
        heads = (delta.key_heads, delta.key_heads, delta.value_heads)
        return tuple(one.reshape(*mixed.shape[:2], n, -1) for one, n in zip((q, k, v), heads, strict=True))


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array,
    chunk: int = CHUNK,
) -> jax.Array:
    """Compute the outputs o of the gated delta rule.

    Everything is float32, except the products on a TPU: it rounds their operands to bfloat16, and sums in
    float32. Queries and keys are scaled to length 1, and queries then by Dk^-0.5. Value head n uses key head
    n * K // N; nothing is repeated. Rows are split over the mesh's dcn and fsdp and key heads over tp, each
    where it divides.

    For a chunk with tokens i, the state S before it, and its decays D and d (states.decays), the tokens'
    updates U, [C, Dv], solve a triangular system (the WY form of arXiv 2406.06484, section 3.2, with decay),
    and the other terms are products of matrices:

        U = (I + beta tril(K K^T * D, -1))^-1 beta (V - d K S)
        O = d Q S + (Q K^T * D) U
        S <- d_C S + K^T (D_C U)

    Args:
        q, k: [B, T, K, Dk].
        v: [B, T, N, Dv], K dividing N.
        g: float32[B, T, N], the logarithm of the factor by which a state decays, at most 0.
        beta: [B, T, N], how much of an error is corrected, from 0 to 1.
        segment_ids: int32[B, T], 0 for padding; tokens of one segment are adjacent.
        chunk: tokens of a chunk; rows are padded to a multiple of it.

    Returns:
        [B, T, N, Dv] in q's dtype.
    """
    (rows, length, heads, width), dtype = q.shape, q.dtype

    def keys(x: jax.Array) -> jax.Array:
        x = constrain(x.astype(jnp.float32), ("fsdp", None, "tp", None))
        return by_chunk(x * jax.lax.rsqrt(jnp.sum(jnp.square(x), -1, keepdims=True) + NORM_EPS), chunk)

    def values(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32).reshape(rows, length, heads, -1, *x.shape[3:])
        return by_chunk(constrain(x, ("fsdp", None, "tp", *(None for _ in x.shape[3:]))), chunk)

    q, k, v, g, beta = keys(q) * width**-0.5, keys(k), values(v), values(g), values(beta)
    within, carried = decays(g, by_chunk(segment_ids, chunk))
    overlap = jnp.einsum("cbkdi,cbkdj->cbkij", k, k)[:, :, :, None] * within * beta[..., None]
    inverse = unit_lower_inverse(jnp.tril(overlap, -1))
    attention = jnp.einsum("cbkdi,cbkdj->cbkij", q, k)[:, :, :, None] * within

    def step(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, beta, inverse, attention, carried, kept = one
        old = jnp.einsum("bkdi,bkrde->bkrei", k, state) * carried[..., None, :]
        written = jnp.einsum("bkrij,bkrej->bkrei", inverse, (v - old) * beta[..., None, :])
        out = jnp.einsum("bkdi,bkrde->bkrei", q, state) * carried[..., None, :]
        out += jnp.einsum("bkrij,bkrej->bkrei", attention, written)
        state = state * carried[..., -1:, None]
        state += jnp.einsum("bkdi,bkrei->bkrde", k, written * kept[..., None, :])
        return state, out

    state = jnp.zeros((*v.shape[1:4], width, v.shape[4]), jnp.float32)
    state = constrain(state, ("fsdp", "tp", None, None, None))
    chunks = (q, k, v, beta, inverse, attention, carried, within[..., -1, :])
    _, out = jax.lax.scan(step, state, chunks)
    out = by_token(out, length).reshape(rows, length, -1, v.shape[4])
    return constrain(out.astype(dtype), ("fsdp", None, "tp", None))


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Return the inverse of I + L, for L that is zero on and above its diagonal.

    By blocks of doubling size: [[P, 0], [L, Q]] has the inverse [[P', 0], [-Q' L P', Q']]. That takes few
    products of matrices; substitution takes many of vectors. A series of powers of L fails where keys repeat,
    as in a row of the same token: the powers grow beyond what float32 can subtract.

    Args:
        lower: float32[..., C, C].
    """
    size = lower.shape[-1]
    place = jnp.arange(size)
    product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)

    def join(level: jax.Array, inverse: jax.Array) -> jax.Array:
        block = place >> level
        joined = (block[:, None] % 2 == 1) & (block[:, None] == block + 1)
        return inverse - product(product(inverse, jnp.where(joined, lower, 0)), inverse)

    identity = jnp.broadcast_to(jnp.eye(size), lower.shape)
    return jax.lax.fori_loop(0, (size - 1).bit_length(), join, identity)


def _inverse_forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    transposed = inverse.swapaxes(-1, -2)
    return (-transposed @ gradient @ transposed,)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)
