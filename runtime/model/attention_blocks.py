"""The attention of Tunix's Gemma models, with splash attention for the scores.

Projections, norms, rotations and scales are Tunix's, called in Tunix's order. Only the scores, their mask and
their product with the values are computed differently. While a model is traced, a block here replaces
`Attention.block`. It has no cache: this code generates no text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .attention import Attend
from .sharding import constrain

Block = Callable[..., Any]


def gemma4(module: Any, attend: Attend) -> Block:
    def block(
        self: Any, x: Any, segment_pos: Any, cache: Any, attn_mask: Any, kv_shared_cache: Any = None
    ) -> tuple[None, jax.Array, tuple[jax.Array, jax.Array]]:
        sharding = self.config.shd_config
        x = x.astype(self.config.dtype)
        rotate = partial(
            module.apply_rope,
            positions=segment_pos,
            base_frequency=self.rope_base_frequency,
            scale_factor=self.rope_scale_factor,
            rope_proportion=self.rope_proportion,
        )
        q = rotate(self._query_norm(constrain(self.q_einsum(x), sharding.act_btnh)))
        if kv_shared_cache is not None:
            k, v = kv_shared_cache["k"], kv_shared_cache["v"]
        else:
            k, v = (self.k_einsum(x),) * 2 if hasattr(self, "k_einsum") else self.kv_einsum(x)
            k, v = (constrain(projected, sharding.act_btnh) for projected in (k, v))
            v = v * jax.lax.rsqrt(jnp.mean(jnp.square(v), axis=-1, keepdims=True) + 1e-06)
            k = rotate(self._key_norm(k))
        local = self.attn_type == module.AttentionType.LOCAL_SLIDING
        out = attend(q, k, v, window=self.config.sliding_window_size if local else None)
        return None, constrain(self.attn_vec_einsum(out), sharding.act_btd), (k, v)

    return block


def gemma3(module: Any, attend: Attend) -> Block:
    def block(self: Any, x: Any, segment_pos: Any, cache: Any, attn_mask: Any) -> tuple[None, jax.Array]:
        q, k, v = _gemma_projections(self, x)
        rotate = partial(
            module.apply_rope,
            positions=segment_pos,
            head_dim=self.head_dim,
            base_frequency=self.rope_base_frequency,
            scale_factor=self.rope_scale_factor,
        )
        q, k = rotate(self._query_norm(q)), rotate(self._key_norm(k))
        out = attend(q * self.query_pre_attn_scalar, k, v, window=_gemma_window(module, self))
        return None, constrain(self.attn_vec_einsum(out), self.shd_config.act_btd)

    return block


def gemma2(module: Any, attend: Attend) -> Block:
    def block(self: Any, x: Any, segment_pos: Any, cache: Any, attn_mask: Any) -> tuple[None, jax.Array]:
        q, k, v = _gemma_projections(self, x)
        rotate = partial(module.apply_rope, positions=segment_pos, head_dim=self.head_dim)
        window, softcap = _gemma_window(module, self), self.attn_logits_soft_cap
        out = attend(rotate(q) * self.head_dim**-0.5, rotate(k), v, window=window, softcap=softcap)
        return None, constrain(self.attn_vec_einsum(out), self.shd_config.act_btd)

    return block


def _gemma_projections(attention: Any, x: jax.Array) -> list[jax.Array]:
    """Return query [B, T, N, H], key and value [B, T, K, H] of Gemma 2 and 3."""
    if attention.use_qkv_einsum:
        projected = attention.qkv_einsum(x)
    else:
        projected = (attention.q_einsum(x), *attention.kv_einsum(x))
    return [constrain(one, attention.shd_config.act_btnh) for one in projected]


def _gemma_window(module: Any, attention: Any) -> int | None:
    local = attention.attn_type == module.AttentionType.LOCAL_SLIDING
    return attention.sliding_window_size if local else None
