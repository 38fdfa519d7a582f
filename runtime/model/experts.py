"""Gemma 4's experts, computed as the published model does and where the tokens are.

Three things differ in this version of Tunix. Its router reads the experts' normalised input, where the
published one reads the residual stream (they agree only where that norm's scale is 1 everywhere); it picks
experts with an approximate top-k, which on a TPU misses some; and its dispatch sorts the tokens of all
devices together, so that every device computes all of them. Here each device sends its own rows through
the experts, whose weights are gathered for that over the data-parallel axis, as any other weight is.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import pxla
from jax.sharding import Mesh, PartitionSpec

from .partition_rules import row_axes

SPLIT = "tp"
"""The mesh axis that features of an expert are split over."""


def decoder_block(
    self: Any,
    x: jax.Array,
    segment_pos: jax.Array,
    cache: Any,
    attn_mask: jax.Array,
    per_layer_input: Any = None,
    kv_shared_cache: Any = None,
) -> tuple[Any, jax.Array, Any]:
    """Replaces DecoderLayer.block of Tunix's Gemma 4 in models with experts.

    Args:
        self: Tunix's DecoderLayer.
        x: [B, T, D].
        segment_pos: int32[B, T].
        attn_mask: bool[B, T, T].
        per_layer_input: None; a checkpoint with experts has no per-layer embeddings.

    Returns:
        (cache, [B, T, D], the layer's keys and values).
    """
    assert per_layer_input is None
    normed = self.pre_attention_norm(x)
    cache, attended, kv = self.attn(normed, segment_pos, cache, attn_mask, kv_shared_cache=kv_shared_cache)
    residual = x + self.post_attention_norm(attended)
    dense = self.dense_post_ffw_norm(self.mlp(self.pre_ffw_norm(residual)))
    run = partial(mixture, self.moe)
    if self.config.remat_config.name == "BLOCK":
        run = jax.checkpoint(run)  # as Tunix does with the attention and the dense block
    mixed = self.moe_post_ffw_norm(run(self.moe_pre_ffw_norm(residual), residual))
    out = residual + self.post_ffw_norm(dense + mixed)
    return cache, out * self.skip_scale.value, kv


def mixture(moe: Any, x: jax.Array, residual: jax.Array) -> jax.Array:
    """The weighted sum of each token's experts.

    Args:
        moe: Tunix's MoERagged.
        x: [B, T, D], what the experts read.
        residual: [B, T, D], what the router reads.

    Returns:
        [B, T, D] in x's dtype.
    """
    weights, choices = route(moe, residual)
    gate_up, down = (w.value.astype(x.dtype) for w in (moe.gating_einsum, moe.linear))
    compute = partial(run_experts, axis=None)
    mesh = pxla.thread_resources.env.physical_mesh
    if not mesh.empty:
        compute = _sharded(mesh, x.shape[0], moe.hidden_dim)
    return compute(x, weights, choices, gate_up, down)


def route(moe: Any, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each token's experts and their weights.

    Returns:
        float32[B, T, K] that sum to 1 over K before each is multiplied by its expert's scale, and
        int32[B, T, K], the experts of the K highest scores.
    """
    dtype = moe.config.dtype
    wide = residual.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    inputs = normed.astype(dtype) * moe.router_scale.value.astype(dtype) * moe.features**-0.5
    scores = jnp.einsum("BTD,DE->BTE", inputs, moe.router_logits.value.astype(dtype))
    best, choices = jax.lax.top_k(scores.astype(jnp.float32), moe.num_experts_per_datapoint)
    # The softmax over all experts, renormalised over the chosen ones, is the softmax over those.
    scale = moe.per_expert_scale.value.astype(jnp.float32)
    return jax.nn.softmax(best, axis=-1) * scale[choices], choices


def run_experts(
    x: jax.Array,
    weights: jax.Array,
    choices: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    axis: str | None,
) -> jax.Array:
    """The experts of one device's rows, sorted by expert so that each is one block of a ragged product.

    Args:
        x: [B, T, D].
        weights: float32[B, T, K].
        choices: int32[B, T, K].
        gate_up: [E, 2, F, D], F this device's share of the experts' features.
        down: [E, F, D].
        axis: the mesh axis that F is split over, None for none.

    Returns:
        [B, T, D] in x's dtype.
    """
    experts, _, features, hidden = gate_up.shape
    chosen = choices.reshape(-1)
    order = jnp.argsort(chosen)
    inverse = jnp.argsort(order)
    sizes = jnp.bincount(chosen, length=experts).astype(jnp.int32)
    rows = _take(x.reshape(-1, hidden), order, inverse)
    gate, up = jnp.split(
        jax.lax.ragged_dot(rows, gate_up.reshape(experts, 2 * features, hidden).swapaxes(1, 2), sizes), 2, -1
    )
    rows = jax.lax.ragged_dot(jax.nn.gelu(gate, approximate=True) * up, down, sizes)
    each = _take(rows, inverse, order).reshape(*choices.shape, hidden)
    out = jnp.einsum("BTKD,BTK->BTD", each.astype(jnp.float32), weights)
    return (out if axis is None else jax.lax.psum(out, axis)).astype(x.dtype)


@jax.custom_vjp
def _take(x: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """Row order[i] // K of x as row i, where each row of x is taken K times.

    `inverse` is the inverse permutation of `order`: with it the gradient is a gather too, where that of
    indexing would be a scatter.

    Args:
        x: [N, D].
        order, inverse: int32[N * K].
    """
    return x[order // (order.size // x.shape[0])]


def _take_forward(x: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, Any]:
    return _take(x, order, inverse), (inverse, x.shape)


def _take_backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, None, None]:
    inverse, (rows, width) = kept
    return gradient[inverse].reshape(rows, -1, width).sum(1), None, None


_take.defvjp(_take_forward, _take_backward)


def _sharded(mesh: Mesh, rows: int, features: int) -> Any:
    """`run_experts` on each device's rows, and its share of the experts' features where that divides."""
    split = SPLIT if SPLIT in mesh.shape and features % mesh.shape[SPLIT] == 0 else None
    tokens = PartitionSpec(row_axes(rows, mesh.shape))
    return jax.shard_map(
        partial(run_experts, axis=split),
        mesh=mesh,
        in_specs=(tokens, tokens, tokens, PartitionSpec(None, None, split), PartitionSpec(None, split)),
        out_specs=tokens,
        check_vma=False,
    )
