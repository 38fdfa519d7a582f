"""Layers that mix tokens by a state which a row carries from token to token, instead of by attention.

A segment starts with a state of zeros, wherever it begins in a row. All of these layers convolve a token with
a few earlier ones. LFM2's short convolution does nothing else. A gated delta net and Mamba 2 have matrices as
states, with one rate of decay for a head and token. A row is cut into chunks: within a chunk all tokens are
computed at once by products of matrices, and only the state before each chunk is passed on. In Mamba 1 every
number of a state decays at a rate of its own, so its tokens are computed one after the other.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from .cache import Cache
from .families.description import Norm
from .layers import HEADS, STREAM, Batch, Block, Config, Einsum, Normalization, named, scaled, unit
from .sharding import constrain, parts

CHUNK = 64
"""Tokens of a chunk. Larger chunks cost larger products of [C, C], smaller chunks cost more states."""

NORM_EPS = 1e-6
"""Added to the squared length of a delta net's queries and keys, as in transformers."""

MAMBA1_CHUNK = 32
"""Tokens of a chunk of Mamba 1, whose states are in memory together during the backward pass."""
UNROLLED = 4
"""Tokens that one pass of Mamba 1's compiled loop computes, so that the state is read and written less
often."""


class Mixer(Block):
    """A layer that convolves its inputs.

    Attributes:
        conv1d: [D, taps], the token's own tap last.
        conv1d_bias: [D], None for none.
    """

    def add_convolution(self, channels: int, taps: int, bias: bool, dtype: Any) -> None:
        self.conv1d = nnx.Param(jnp.zeros((channels, taps), dtype))
        self.conv1d_bias = nnx.Param(jnp.zeros(channels, dtype)) if bias else None

    def convolve(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Convolve [B, T, D] within the batch's segments, or after the earlier tokens of its cache."""
        bias = None if self.conv1d_bias is None else self.conv1d_bias.get_value()
        weight, cache = self.conv1d.get_value(), batch.cache
        if cache is None:
            return causal_conv(x, weight, batch.segment_ids, bias)
        earlier = weight.shape[1] - 1
        x = jnp.where((batch.segment_ids > 0)[..., None], x, 0)
        before = cache.take(lambda: jnp.zeros((x.shape[0], earlier, x.shape[2]), x.dtype))
        row = jnp.concatenate([before, x], axis=1)
        latest = cache.last[:, None] + 1 + jnp.arange(earlier)
        cache.keep(jnp.take_along_axis(row, latest[..., None], axis=1))
        return causal_conv(row, weight, jnp.ones(row.shape[:2], jnp.int32), bias)[:, earlier:]


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
    wide_x, taps = x.astype(jnp.float32), weight.astype(jnp.float32)
    out = wide_x * taps[:, -1]
    for back in range(1, min(taps.shape[1], x.shape[1])):
        earlier = jnp.pad(wide_x[:, :-back], ((0, 0), (back, 0), (0, 0)))
        same = jnp.pad(segment_ids[:, back:] == segment_ids[:, :-back], ((0, 0), (back, 0)))
        out += jnp.where(same[..., None], earlier * taps[:, -1 - back], 0)
    if bias is not None:
        out += bias.astype(jnp.float32)
    return out.astype(x.dtype)


class ShortConv(Mixer):
    """LFM2's gated short convolution: a convolution between two gates.

    Of a token's three projections b, c and x (https://arxiv.org/abs/2511.23404), the output is that of a last
    projection of c * conv(b * x).
    """

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture, config.dtype
        assert a.conv is not None
        self.config = config
        d, bias = a.hidden_size, a.conv.bias
        self.in_proj = Einsum("BTD,DCF->BTCF", (d, 3, d), dtype, "kernel", 2 * bias)
        self.add_convolution(d, a.conv.taps, bias, dtype)
        self.out_proj = Einsum("BTI,IO->BTO", (d, d), dtype, "kernel", int(bias))

    def block(self, x: jax.Array, batch: Batch) -> jax.Array:
        b, c, x = jnp.moveaxis(self.in_proj(x), 2, 0)
        return constrain(self.out_proj(constrain(c * self.convolve(b * x, batch), STREAM)), STREAM)


def by_chunk(x: jax.Array, chunk: int) -> jax.Array:
    """Reshape [B, T, ...] to [chunks, B, ..., C]; rows are padded with zeros to a multiple of the chunk."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % chunk), *((0, 0) for _ in x.shape[2:])))
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), (1, 2), (0, -1))


def by_token(x: jax.Array, length: int) -> jax.Array:
    """Reshape [chunks, B, ..., C] to [B, T, ...], without the padding."""
    x = jnp.moveaxis(x, (0, -1), (1, 2))
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :length]


def from_cache(
    cache: Cache | None, state: jax.Array, segment_ids: jax.Array, *rates: jax.Array
) -> tuple[jax.Array, ...]:
    """Return the state that a row begins with, and segments and rates with which padding leaves it as it is.

    Without a cache, these are the arguments.

    Args:
        state: float32[B, ...], of rows without earlier tokens.
        segment_ids: int32[B, T], 0 for padding.
        rates: [B, T, ...]; a token whose rates are 0 neither changes the state nor lets it decay.
    """
    if cache is None:
        return state, segment_ids, *rates
    real = (segment_ids > 0)[..., None]
    kept = (jnp.where(real, rate, 0) for rate in rates)
    return cache.take(lambda: state), jnp.zeros_like(segment_ids), *kept


class Chunk(NamedTuple):
    """What the C tokens of a chunk read and write of states S, [B, K, R, Dk, Dv].

    The R heads of one of K groups share keys and queries. Over all chunks of a row, each array has a first
    axis of chunks.

    Attributes:
        keys, queries: [B, K, Dk, C].
        overlap: [B, K, R, C, C], what each token reads of what the tokens of its chunk write: Q K^T * D.
        carried: [B, K, R, C], what each token sees of the state before the chunk: d.
        kept: [B, K, R, C], what the state after the chunk keeps of what each token writes: the last row of D.
    """

    keys: jax.Array
    queries: jax.Array
    overlap: jax.Array
    carried: jax.Array
    kept: jax.Array

    @classmethod
    def of(cls, keys: jax.Array, queries: jax.Array, within: jax.Array, carried: jax.Array) -> Chunk:
        """Return all chunks of a row, from their decays D and d (see `decays`)."""
        overlap = jnp.einsum("cbkdi,cbkdj->cbkij", queries, keys)[:, :, :, None] * within
        return cls(keys, queries, overlap, carried, within[..., -1, :])

    def read(self, state: jax.Array, vectors: jax.Array) -> jax.Array:
        """Return what each token reads of the state before the chunk: d X S, [B, K, R, Dv, C].

        Args:
            vectors: X, the keys or the queries.
        """
        return jnp.einsum("bkdi,bkrde->bkrei", vectors, state) * self.carried[..., None, :]

    def pass_on(self, state: jax.Array, written: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the state after the chunk, and the tokens' outputs [B, K, R, Dv, C].

        With the tokens' writes U, these are S <- d_C S + K^T (D_C U) and O = d Q S + (Q K^T * D) U.

        Args:
            written: U, [B, K, R, Dv, C].
        """
        out = self.read(state, self.queries)
        out += jnp.einsum("bkrij,bkrej->bkrei", self.overlap, written)
        state = state * self.carried[..., -1:, None]
        state += jnp.einsum("bkdi,bkrei->bkrde", self.keys, written * self.kept[..., None, :])
        return state, out


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


class DeltaNet(Mixer):
    """The gated delta net of one layer: linear attention with a state that decays and is corrected.

    A head updates its state S of [Dk, Dv] at each token of the row (Yang, Kautz and Hatamizadeh 2024,
    arXiv 2412.06464, equation 10, which has S transposed):

        S <- exp(g) S
        S <- S + k (beta (v - S^T k))^T
        o = S^T q
    """

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture, config.dtype
        assert a.delta is not None
        self.config = config
        d, n, h = a.hidden_size, a.delta.value_heads, a.delta.value_dim
        for name, features in a.delta_projections.items():
            flat = len(features) == 1
            equation, weight = ("BTI,IO->BTO", "kernel") if flat else ("BTD,DNH->BTNH", "w")
            setattr(self, name, Einsum(equation, (d, *features), dtype, weight))
        self.add_convolution(a.delta.features, a.delta.taps, False, dtype)
        self.A_log, self.dt_bias = (nnx.Param(jnp.zeros(n, dtype)) for _ in range(2))
        self.norm = Normalization(Norm(a.norm.eps), (h,), dtype)
        self.out_proj = Einsum("BTNH,NHD->BTD", (n, h, d), dtype)

    def block(self, x: jax.Array, batch: Batch) -> jax.Array:
        mixed, z, b, a = self.projected(x)
        q, k, v = self.convolved(mixed, batch)
        beta = jax.nn.sigmoid(b.astype(jnp.float32))
        decay = -jnp.exp(wide(self.A_log)) * jax.nn.softplus(a.astype(jnp.float32) + wide(self.dt_bias))
        out = self.norm(gated_delta_rule(q, k, v, decay, beta, batch.segment_ids, batch.cache))
        gate = jax.nn.silu(constrain(z, HEADS).astype(jnp.float32))
        gated = (out.astype(jnp.float32) * gate).astype(x.dtype)
        return constrain(self.out_proj(named(gated, batch)), STREAM)

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
        q, k, v, b, a = (part.reshape(*x.shape[:2], -1) for part in (q, k, v, b, a))
        return jnp.concatenate((q, k, v), axis=-1), z.reshape(*x.shape[:2], -1, delta.value_dim), b, a

    def convolved(self, mixed: jax.Array, batch: Batch) -> tuple[jax.Array, ...]:
        """Convolve and split: queries and keys [B, T, K, Dk], values [B, T, N, Dv]."""
        delta = self.config.architecture.delta
        assert delta is not None
        keys = delta.key_heads * delta.key_dim
        vectors = jnp.split(jax.nn.silu(self.convolve(mixed, batch)), (keys, 2 * keys), axis=-1)
        heads = (delta.key_heads, delta.key_heads, delta.value_heads)
        return tuple(x.reshape(*mixed.shape[:2], n, -1) for x, n in zip(vectors, heads, strict=True))


def gated_delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array,
    cache: Cache | None = None,
) -> jax.Array:
    """Compute the outputs o of the gated delta rule.

    Everything is float32, except the products on a TPU: it rounds their operands to bfloat16, and sums in
    float32. Queries and keys are scaled to length 1, and queries then by Dk^-0.5. Value head n uses key head
    n * K // N; nothing is repeated. Rows are split over the mesh's dcn and fsdp and key heads over tp, each
    where it divides.

    The writes U of a chunk's tokens solve a triangular system (the WY form of arXiv 2406.06484, section 3.2,
    with decay), for the state S before the chunk and its decays D and d:

        U = (I + beta tril(K K^T * D, -1))^-1 beta (V - d K S)

    Args:
        q, k: [B, T, K, Dk].
        v: [B, T, N, Dv], K dividing N.
        g: float32[B, T, N], the logarithm of the factor by which a state decays, at most 0.
        beta: [B, T, N], how much of an error is corrected, from 0 to 1.
        segment_ids: int32[B, T], 0 for padding; tokens of one segment are adjacent.
        cache: of earlier tokens; None for whole rows.

    Returns:
        [B, T, N, Dv] in q's dtype.
    """
    (rows, length, heads, width), dtype = q.shape, q.dtype
    chunk = CHUNK if cache is None else min(CHUNK, length)
    state = jnp.zeros((rows, heads, v.shape[2] // heads, width, v.shape[3]), jnp.float32)
    state, segment_ids, g, beta = from_cache(cache, state, segment_ids, g, beta)

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

    def step(state: jax.Array, inputs: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        chunk, v, beta, inverse = inputs
        errors = (v - chunk.read(state, chunk.keys)) * beta[..., None, :]
        return chunk.pass_on(state, jnp.einsum("bkrij,bkrej->bkrei", inverse, errors))

    state = constrain(state, ("fsdp", "tp", None, None, None))
    state, out = jax.lax.scan(step, state, (Chunk.of(k, q, within, carried), v, beta, inverse))
    if cache is not None:
        cache.keep(state)
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


def wide(parameter: Any) -> jax.Array:
    """Return a parameter's value in float32."""
    return jnp.asarray(parameter.get_value(), jnp.float32)


class Mamba(Mixer):
    """Mamba 2's mixer of one layer; Mamba1 shares its convolution and its last step.

    A head updates its state S of [state, head_dim] at each token of the row (Dao and Gu 2024, arXiv
    2405.21060), with a step size t, a rate a < 0, and the projections b and c of its group:

        S <- exp(t a) S + t b x^T
        y = S^T c + skip * x
    """

    def __init__(self, config: Config) -> None:
        a, dtype = config.architecture, config.dtype
        assert a.mamba is not None
        self.config = config
        self.sizes = m = a.mamba
        self.add_convolution(m.convolved, m.taps, "conv" in m.biases, dtype)
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

    def block(self, x: jax.Array, batch: Batch) -> jax.Array:
        return constrain(self.out_proj(named(self.mixed(x, batch).astype(x.dtype), batch)), STREAM)

    def mixed(self, x: jax.Array, batch: Batch) -> jax.Array:
        """Return the input of the last projection, float32."""
        m = self.sizes
        projected = self.in_proj(scaled(x, m.input_scale))
        sections = jnp.split(projected, list(accumulate(m.projected[:-1])), axis=-1)
        gate, *mixed, step = (scaled(part, by) for part, by in zip(sections, m.scales, strict=True))
        convolved = jax.nn.silu(self.convolve(jnp.concatenate(mixed, axis=-1), batch))
        inner, b, c = jnp.split(convolved, list(accumulate(m.projected[1:3])), axis=-1)
        inner = inner.reshape(*x.shape[:2], m.heads, m.head_dim).astype(jnp.float32)
        b, c = (part.reshape(*x.shape[:2], m.groups, m.state) for part in (b, c))
        step = jax.nn.softplus(step.astype(jnp.float32) + wide(self.dt_bias))
        step = jnp.clip(step, m.shortest, m.longest)
        out = mamba2_scan(inner, step, -jnp.exp(wide(self.A_log)), b, c, batch.segment_ids, batch.cache)
        return self.gated(out + inner * wide(self.D)[:, None], gate)

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


def mamba2_scan(
    x: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    b: jax.Array,
    c: jax.Array,
    segment_ids: jax.Array,
    cache: Cache | None = None,
) -> jax.Array:
    """Compute the outputs S^T c of all tokens.

    Everything is float32, except the products on a TPU: it rounds their operands to bfloat16, and sums in
    float32. Head n uses group n * K // N; nothing is repeated. Rows are split over the mesh's dcn and fsdp,
    and over tp the groups, or the heads of each group if tp does not divide the groups. In a chunk, b are the
    keys, c the queries, and t x what is written (section 6 of the paper).

    Args:
        x: [B, T, N, H].
        step: float32[B, T, N], above 0.
        rate: float32[N], below 0.
        b, c: [B, T, K, S], K dividing N.
        segment_ids: int32[B, T], 0 for padding; tokens of one segment are adjacent.
        cache: of earlier tokens; None for whole rows.

    Returns:
        float32[B, T, N, H].
    """
    rows, length, groups, states = b.shape
    chunk = CHUNK if cache is None else min(CHUNK, length)
    state = jnp.zeros((rows, groups, x.shape[2] // groups, states, x.shape[3]), jnp.float32)
    state, segment_ids, step = from_cache(cache, state, segment_ids, step)
    over = ("tp", None) if parts(groups, "tp") > 1 else (None, "tp")

    def by_group(x: jax.Array) -> jax.Array:
        return by_chunk(constrain(x.astype(jnp.float32), ("fsdp", None, over[0], None)), chunk)

    def by_head(x: jax.Array) -> jax.Array:
        x = x.astype(jnp.float32).reshape(rows, length, groups, -1, *x.shape[3:])
        return by_chunk(constrain(x, ("fsdp", None, *over, *(None for _ in x.shape[4:]))), chunk)

    written, g = by_head(x * step[..., None]), by_head(step * rate)
    chunks = Chunk.of(by_group(b), by_group(c), *decays(g, by_chunk(segment_ids, chunk)))
    state = constrain(state, ("fsdp", *over, None, None))
    state, out = jax.lax.scan(
        lambda state, inputs: inputs[0].pass_on(state, inputs[1]), state, (chunks, written)
    )
    if cache is not None:
        cache.keep(state)
    return constrain(by_token(out, length).reshape(x.shape), ("fsdp", None, "tp", None))


class Mamba1(Mamba):
    """Mamba 1's mixer of one layer. Step, b and c are normalized.

    At each token of the row, a feature d updates its state S of [state] (Gu and Dao 2023, arXiv 2312.00752)
    with a step size t of its own, rates a < 0, and projections b and c that all features share:

        S <- exp(t a) S + t x b
        y = S . c + skip * x
    """

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

    def mixed(self, x: jax.Array, batch: Batch) -> jax.Array:
        sizes = self.sizes.selected
        x, gate = (constrain(part, STREAM) for part in jnp.moveaxis(self.in_proj(x), 2, 0))
        x = jax.nn.silu(self.convolve(x, batch))
        sections = jnp.split(self.x_proj(x), list(accumulate(sizes.values()))[:-1], axis=-1)
        step, b, c = (getattr(self, name)(part) for name, part in zip(sizes, sections, strict=True))
        step = jax.nn.softplus(self.dt_proj(step).astype(jnp.float32))
        out = mamba1_scan(x, step, -jnp.exp(wide(self.A_log)), b, c, batch.segment_ids, batch.cache)
        return (out + x.astype(jnp.float32) * wide(self.D)) * jax.nn.silu(gate.astype(jnp.float32))


def mamba1_scan(
    x: jax.Array,
    step: jax.Array,
    rate: jax.Array,
    b: jax.Array,
    c: jax.Array,
    segment_ids: jax.Array,
    cache: Cache | None = None,
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
        cache: of earlier tokens; None for whole rows.

    Returns:
        float32[B, T, D].
    """
    chunk = MAMBA1_CHUNK if cache is None else min(MAMBA1_CHUNK, x.shape[1])
    state = jnp.zeros((x.shape[0], rate.shape[1], x.shape[2]), jnp.float32)
    state, segment_ids, step = from_cache(cache, state, segment_ids, step)
    begins = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (1, 0)))
    rate = constrain(rate.T, (None, "tp"))

    def chunks(x: jax.Array) -> jax.Array:
        """Return [chunks, C, B, ...]."""
        return jnp.moveaxis(by_chunk(x, chunk), -1, 1)

    def split(x: jax.Array, over: str | None = None) -> jax.Array:
        return chunks(constrain(x.astype(jnp.float32), ("fsdp", None, over)))

    def token(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        begins, step, written, b, c = inputs
        kept = jnp.where(begins[:, None, None], 0, jnp.exp(step[:, None] * rate))
        state = kept * state + b[..., None] * written[:, None]
        return state, (state * c[..., None]).sum(1)

    @jax.checkpoint
    def through(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        return jax.lax.scan(token, state, inputs, unroll=UNROLLED)

    state = constrain(state, ("fsdp", None, "tp"))
    tokens = chunks(begins), split(step, "tp"), split(step * x, "tp"), split(b), split(c)
    state, out = jax.lax.scan(through, state, tokens)
    if cache is not None:
        cache.keep(state)
    return constrain(by_token(jnp.moveaxis(out, 1, -1), x.shape[1]), STREAM)
