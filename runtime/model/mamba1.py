"""Mamba 1's mixer: a state whose every number decays at a rate of its own, over packed rows.

At each token of the row, a feature d updates its state S of [state] (Gu and Dao 2023, arXiv 2312.00752) with
a step size t of its own, rates a < 0, and projections b and c that all features share:

    S <- exp(t a) S + t x b
    y = S . c + skip * x

A segment starts with S = 0, wherever it begins in a row.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import layers
from .layers import STREAM, Einsum, Normalization
from .mamba import Mamba, wide
from .sharding import constrain
from .states import by_chunk, by_token

CHUNK = 32
"""Tokens of a chunk, whose states are in memory together during the backward pass."""
UNROLLED = 4
"""Tokens that one pass of the compiled loop computes, so that the state is read and written less often."""


class Mamba1(Mamba):
    """The mixer of one layer. Step, b and c are normalized."""

    def add_projections(self, hidden: int, dtype: Any) -> None:
        m, norm = self.sizes, self.config.architecture.norm
        into, biased = (hidden, 2, m.inner), [int(part in m.biases) for part in ("in", "out")]
        self.in_proj = Einsum("BTD,DCF->BTCF", into, dtype, "kernel", 2 * biased[0])
        self.x_proj = Einsum("BTI,IO->BTO", (m.inner, sum(m.selected.values())), dtype, "kernel")
        for name, features in m.selected.items():
            setattr(self, name, Normalization(norm, (features,), dtype))
        self.dt_proj = Einsum("BTI,IO->BTO", (m.rank, m.inner), dtype, "kernel", 1)
        self.A_log = nnx.Param(jnp.zeros((m.inner, m.state), dtype))
        self.out_proj = Einsum("BTI,IO->BTO", (m.inner, hidden), dtype, "kernel", biased[1])

    def mixed(self, x: jax.Array) -> jax.Array:
        sizes = self.sizes.selected
        x, gate = (constrain(one, STREAM) for one in jnp.moveaxis(self.in_proj(x), 2, 0))
        x = self.convolved(x)
        parts = jnp.split(self.x_proj(x), list(accumulate(sizes.values()))[:-1], axis=-1)
        step, b, c = (getattr(self, name)(part) for name, part in zip(sizes, parts, strict=True))
        step = jax.nn.softplus(self.dt_proj(step).astype(jnp.float32))
        out = scan(x, step, -jnp.exp(wide(self.A_log)), b, c, layers.segments())
        return (out + x.astype(jnp.float32) * wide(self.D)) * jax.nn.silu(gate.astype(jnp.float32))


def scan(
    x: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    b: jax.Array,
    c: jax.Array,
    segment_ids: jax.Array,
) -> jax.Array:
    """Compute the outputs S . c of all tokens, in float32, one token after the other.

    The backward pass computes the states again, chunk by chunk: only the state before each chunk is kept.
    Rows are split over the mesh's dcn and fsdp, features over tp. Compiled for v5e, an associative scan over
    each chunk moves ten times the bytes.

    Args:
        x: [B, T, D].
        step: float32[B, T, D], above 0.
        rate: float32[D, S], below 0.
        b, c: [B, T, S].
        segment_ids: int32[B, T], 0 for padding; tokens of one segment are adjacent.

    Returns:
        float32[B, T, D].
    """
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    rate = constrain(rate.T, (None, "tp"))

    def chunks(one: jax.Array) -> jax.Array:
        """Return [chunks, C, B, ...]."""
        return jnp.moveaxis(by_chunk(one, CHUNK), -1, 1)

    def split(one: jax.Array, over: str | None = None) -> jax.Array:
        return chunks(constrain(one.astype(jnp.float32), ("fsdp", None, over)))

    def token(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        begins, step, written, b, c = one
        kept = jnp.where(begins[:, None, None], 0, jnp.exp(step[:, None] * rate))
        state = kept * state + b[..., None] * written[:, None]
        return state, (state * c[..., None]).sum(1)

    @jax.checkpoint
    def through(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(token, state, one, unroll=UNROLLED)

    state = constrain(jnp.zeros((x.shape[0], *rate.shape), jnp.float32), ("fsdp", None, "tp"))
    tokens = chunks(begins), split(step, "tp"), split(step * x, "tp"), split(b), split(c)
    _, out = jax.lax.scan(through, state, tokens)
    return constrain(by_token(jnp.moveaxis(out, 1, -1), x.shape[1]), STREAM)
