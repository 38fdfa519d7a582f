"""Mamba 2's mixer: a state that decays, over packed rows.

A head updates its state S of [state, head_dim] at each token of the row (Dao and Gu 2024, arXiv 2405.21060),
with a step size t, a rate a < 0, and the projections b and c of its group:

    S <- exp(t a) S + t b x^T
    y = S^T c + skip * x

A segment starts with S = 0, wherever it begins in a row.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers
from .layers import STREAM, Block, Config, Einsum, scaled, unit
from .sharding import constrain, parts
from .states import CHUNK, by_chunk, by_token, causal_conv, decays


class Mamba(Block):
    """The mixer of one layer; Mamba 1's (mamba1.py) shares its convolution."""

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture, config.dtype
        assert a.mamba is not None
        self.config = config
        self.sizes = m = a.mamba
        self.conv1d = nnx.Param(jnp.zeros((m.convolved, m.taps), dtype))
        self.conv1d_bias = nnx.Param(jnp.zeros(m.convolved, dtype)) if "conv" in m.biases else None
        self.D = nnx.Param(jnp.zeros(m.heads, dtype))
        self.add_projections(a.hidden_size, dtype)

    def add_projections(self, hidden: int, dtype: Any) -> None:
        """Add what makes the recurrence's inputs, and what its outputs go through."""
        m = self.sizes
        into, out_of = (hidden, sum(m.projected)), (m.heads, m.head_dim, hidden)
        self.in_proj = Einsum("BTI,IO->BTO", into, dtype, "kernel", int("in" in m.biases))
        self.A_log, self.dt_bias = (nnx.Param(jnp.zeros(m.heads, dtype)) for _ in range(2))
        self.norm = nnx.Param(jnp.zeros(m.inner, dtype)) if m.norm_parts else None
        self.out_proj = Einsum("BTNH,NHD->BTD", out_of, dtype, bias=int("out" in m.biases))

    def block(self, x: jax.Array) -> jax.Array:
        return constrain(self.out_proj(self.mixed(x).astype(x.dtype)), STREAM)

    def mixed(self, x: jax.Array) -> jax.Array:
        """Return the input of the last projection, float32."""
        m = self.sizes
        projected = self.in_proj(scaled(x, m.input_scale))
        sections = jnp.split(projected, list(accumulate(m.projected[:-1])), axis=-1)
        gate, *mixed, step = (scaled(one, by) for one, by in zip(sections, m.scales, strict=True))
        convolved = self.convolved(jnp.concatenate(mixed, axis=-1))
        inner, b, c = jnp.split(convolved, list(accumulate(m.projected[1:3])), axis=-1)
        inner = inner.reshape(*x.shape[:2], m.heads, m.head_dim).astype(jnp.float32)
        b, c = (one.reshape(*x.shape[:2], m.groups, m.state) for one in (b, c))
        step = jax.nn.softplus(step.astype(jnp.float32) + wide(self.dt_bias))
        step = jnp.clip(step, m.shortest, m.longest)
        out = scan(inner, step, -jnp.exp(wide(self.A_log)), b, c, layers.segments())
        return self.gated(out + inner * wide(self.D)[:, None], gate)

    def convolved(self, x: jax.Array) -> jax.Array:
        """Return the activation of the convolution."""
        bias = None if self.conv1d_bias is None else self.conv1d_bias.get_value()
        return jax.nn.silu(causal_conv(x, self.conv1d.get_value(), layers.segments(), bias))

    def gated(self, out: jax.Array, gate: jax.Array) -> jax.Array:
        """Normalize [B, T, N, H], and multiply by the activation of the gate [B, T, N * H], before or after.

        Returns:
            float32[B, T, N, H].
        """
        m = self.sizes
        gate = jax.nn.silu(gate.astype(jnp.float32)).reshape(out.shape)
        if self.norm is None:
            return out * gate
        out = out if m.gate_last else out * gate
        normed = unit(out.reshape(*out.shape[:2], m.norm_parts, -1), (-1,), self.config.architecture.norm.eps)
        normed = normed.reshape(out.shape) * wide(self.norm).reshape(out.shape[2:])
        return normed * gate if m.gate_last else normed


def wide(parameter: Any) -> jax.Array:
    return jnp.asarray(parameter.get_value(), jnp.float32)


def scan(
    x: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    b: jax.Array,
    c: jax.Array,
    segment_ids: jax.Array,
) -> jax.Array:
    """Compute the outputs S^T c of all tokens.

    Everything is float32, except the products on a TPU: it rounds their operands to bfloat16, and sums in
    float32. Head n uses group n * K // N; nothing is repeated. Rows are split over the mesh's dcn and fsdp,
    and over tp the groups, or the heads of each group if tp does not divide the groups.

    For a chunk with the state S before it, and its decays D and d (states.decays), all terms are products of
    matrices, where X has the rows t x (section 6 of the paper):

        Y = (C B^T * D) X + d C S
        S <- d_C S + B^T (D_C X)

    Args:
        x: [B, T, N, H].
        step: float32[B, T, N], above 0.
        rate: float32[N], below 0.
        b, c: [B, T, K, S], K dividing N.
        segment_ids: int32[B, T], 0 for padding; tokens of one segment are adjacent.

    Returns:
        float32[B, T, N, H].
    """
    rows, length, groups, states = b.shape
    over = ("tp", None) if parts(groups, "tp") > 1 else (None, "tp")

    def by_group(one: jax.Array) -> jax.Array:
        return by_chunk(constrain(one.astype(jnp.float32), ("fsdp", None, over[0], None)), CHUNK)

    def by_head(one: jax.Array) -> jax.Array:
        one = one.astype(jnp.float32).reshape(rows, length, groups, -1, *one.shape[3:])
        return by_chunk(constrain(one, ("fsdp", None, *over, *(None for _ in one.shape[4:]))), CHUNK)

    b, c, written, g = by_group(b), by_group(c), by_head(x * step[..., None]), by_head(step * rate)
    within, carried = decays(g, by_chunk(segment_ids, CHUNK))
    seen = jnp.einsum("cbkdi,cbkdj->cbkij", c, b)[:, :, :, None] * within

    def through(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        b, c, written, seen, carried, kept = one
        out = jnp.einsum("bkdi,bkrde->bkrei", c, state) * carried[..., None, :]
        out += jnp.einsum("bkrij,bkrej->bkrei", seen, written)
        state = state * carried[..., -1:, None]
        state += jnp.einsum("bkdi,bkrei->bkrde", b, written * kept[..., None, :])
        return state, out

    state = jnp.zeros((rows, groups, written.shape[3], states, x.shape[3]), jnp.float32)
    state = constrain(state, ("fsdp", *over, None, None))
    _, out = jax.lax.scan(through, state, (b, c, written, seen, carried, within[..., -1, :]))
    return constrain(by_token(out, length).reshape(x.shape), ("fsdp", None, "tp", None))
