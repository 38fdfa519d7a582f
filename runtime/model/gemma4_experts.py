"""Gemma 4's experts, computed as the published model does, on the devices that hold the tokens.

Tunix differs from the published model in three ways. Its router reads the experts' normalized input instead
of the residual stream (they agree only if that norm's scale is 1 everywhere). It picks experts with an
approximate top-k, which on a TPU misses some. Its dispatch sorts the tokens of all devices together, so that
every device computes all of them. Here each device sends its own rows through the experts, whose weights are
gathered over the data-parallel axis for this, like all other weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .expert_load import note, through
from .expert_products import run
from .experts import adapters_of
from .remat import recomputed


def layer(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, jax.Array, Any]:
    """Replace DecoderLayer.__call__, so that the experts' loads leave a layer that is recomputed."""
    block = type(self).block
    if self.config.remat_config.name == "DECODER":
        block = recomputed(block, experts=True)
    out: tuple[Any, jax.Array, Any] = block(self, *args, **kwargs)
    return out


def decoder_block(
    self: Any,
    x: jax.Array,
    segment_pos: jax.Array,
    cache: Any,
    attn_mask: jax.Array,
    per_layer_input: Any = None,
    kv_shared_cache: Any = None,
) -> tuple[Any, jax.Array, Any]:
    """Replace DecoderLayer.block of Tunix's Gemma 4 in models with experts.

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
    run: Callable[..., jax.Array] = partial(mixture, self.moe)
    if self.config.remat_config.name == "BLOCK":
        run = through(jax.checkpoint, run)  # as Tunix does with the attention and the dense block
    mixed = self.moe_post_ffw_norm(run(self.moe_pre_ffw_norm(residual), residual))
    out = residual + self.post_ffw_norm(dense + mixed)
    return cache, out * self.skip_scale.value, kv


def mixture(moe: Any, x: jax.Array, residual: jax.Array) -> jax.Array:
    """Return the weighted sum of each token's experts.

    Args:
        moe: Tunix's MoERagged.
        x: [B, T, D], the experts' input.
        residual: [B, T, D], the router's input.

    Returns:
        [B, T, D] in x's dtype.
    """
    weights, choices = route(moe, residual)
    gate_up, down = (weight.get_raw_value() for weight in (moe.gating_einsum, moe.linear))
    # Codes and scales, if the weights are stored quantized.
    arrays = {"gate_up": jax.tree.map(lambda array: jnp.moveaxis(array, 3, 1), gate_up), "down": down}
    x, adapters = adapters_of(moe, x, gate_up="gating_einsum", down="linear")
    return run(
        x, weights, choices, arrays | adapters, lambda gate, up: jax.nn.gelu(gate, approximate=True) * up
    )


def route(self: Any, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return each token's experts and their weights.

    Args:
        self: Tunix's MoERagged; named so for Qwix, which looks for the module that computes a product.
        residual: [B, T, D].

    Returns:
        float32[B, T, K] that sum to 1 over K before each is multiplied by its expert's scale, and
        int32[B, T, K], the experts of the K highest scores.
    """
    dtype = self.config.dtype
    wide = residual.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)
    inputs = normed.astype(dtype) * self.router_scale.value.astype(dtype) * self.features**-0.5
    scores = jnp.einsum("BTD,DE->BTE", inputs, self.router_logits.value.astype(dtype))
    best, choices = jax.lax.top_k(scores.astype(jnp.float32), self.num_experts_per_datapoint)
    note(scores, choices)
    # The softmax over all experts, renormalized over the chosen ones, is the softmax over those.
    scale = self.per_expert_scale.value.astype(jnp.float32)
    return jax.nn.softmax(best, axis=-1) * scale[choices], choices
