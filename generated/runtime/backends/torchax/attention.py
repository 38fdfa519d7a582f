"""transformers' attention interface, computed by jax: within segments, causal, with a window or without.

transformers hands each layer's queries, keys and values to a function that its config names, and every
other argument of the model's call along with them: `segment_ids`, from which the mask is made here. So
packed rows, padding and sliding windows mean what they mean in train.py, and no [T, T] mask is an argument
of the layers. Stock scaled_dot_product_attention gives NaN where all that a query may see is padding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
import torchax
from jax.ad_checkpoint import checkpoint_name
from transformers import AttentionInterface

from runtime import sharding
from runtime.attention import attend_within
from runtime.forward import attention_mask
from runtime.remat import ATTENTION


class _Scores(NamedTuple):
    """What a layer's scores are: their factor, how many tokens a token sees, and the cap; None for none."""

    scale: float
    window: int | None
    softcap: float | None


def register(attention: str) -> str:
    """Makes a recipe's attention known to transformers.

    Args:
        attention: "dot" or "splash".

    Returns:
        What to give as attn_implementation. transformers makes no mask for a name that it has none for.
    """
    kernel = _dot if attention == "dot" else _splash

    def attend(
        module: torch.nn.Module,
        query: Any,
        key: Any,
        value: Any,
        attention_mask: Any,
        *,
        segment_ids: Any,
        scaling: float,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Any, None]:
        """[B, T, N, H] from query [B, N, T, H] and key, value [B, K, T, H]."""
        q, k, v, segments = _arrays(query, key, value, segment_ids)
        out = kernel(q, k, v, segments, _Scores(scaling, sliding_window, softcap))
        return torchax.default_env().j2t_iso(out), None

    name = f"recipec_{attention}"
    AttentionInterface.register(name, attend)
    return name


def _dot(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, how: _Scores) -> jax.Array:
    """[B, T, N, H] from q [B, T, N, H] and k, v [B, T, K, H]; scores and sums in float32."""
    mask = visible(segments, how.window)
    if how.softcap is None:
        out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=how.scale)
    else:
        out = _soft_capped(q, k, v, mask, how.scale, how.softcap)
    return checkpoint_name(out, ATTENTION)


def _splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, how: _Scores) -> jax.Array:
    """As `_dot`, by the TPU's kernel, which names what it keeps itself."""
    return attend_within(segments)(q * how.scale, k, v, how.window, how.softcap)


def visible(segment_ids: jax.Array, window: int | None) -> jax.Array:
    """What each token may attend to: bool[B, T, T], indexed by row, query and key.

    Args:
        segment_ids: int32[B, T], 0 for padding.
        window: how many tokens a token sees, itself included; None for all before it.
    """
    mask = attention_mask(segment_ids)
    if window is None:
        return mask
    at = jnp.arange(segment_ids.shape[1])
    return mask & (at[:, None] - at[None, :] < window)


def _soft_capped(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float, softcap: float
) -> jax.Array:
    """Gemma 2's: scores become tanh(s / softcap) * softcap before the mask."""
    rows, length, heads, size = q.shape
    grouped = q.reshape(rows, length, k.shape[2], heads // k.shape[2], size)
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32) * scale
    scores = jnp.where(mask[:, None, None], jnp.tanh(scores / softcap) * softcap, -0.7 * 3.4e38)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    return jnp.einsum("BKGTS,BSKH->BTKGH", weights, v).reshape(rows, length, heads, size)


def _arrays(query: Any, key: Any, value: Any, segment_ids: Any) -> tuple[jax.Array, ...]:
    env = torchax.default_env()
    q, k, v, segments = env.t2j_iso(env.v2t_iso((query, key, value, segment_ids)))
    split = ("fsdp", None, "tp", None)
    return (*(sharding.constrain(x.swapaxes(1, 2), split) for x in (q, k, v)), segments)
