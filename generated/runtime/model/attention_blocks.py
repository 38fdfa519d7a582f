"""Each family's attention with splash attention at its heart.

Projections, norms, rotations and scales are Tunix's, called in Tunix's order; only the scores, their mask
and their product with the values are computed otherwise. A block takes the place of `Attention.block`
while a model is traced. It has no cache: nothing here generates text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .attention import Attend, attend_within
from .sharding import constrain

Block = Callable[..., Any]


def replacements(name: str, module: Any, segment_ids: jax.Array) -> Iterator[tuple[Any, str, Any]]:
    """What is replaced in a Tunix model's module for one batch: (owner, attribute, value).

    Args:
        name: of the family.
        module: Tunix's, of that family.
        segment_ids: int32[B, T], 0 for padding.
    """
    yield module.Attention, "block", BLOCKS[name](module, attend_within(segment_ids))


def _gemma4(module: Any, attend: Attend) -> Block:
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


def _gemma3(module: Any, attend: Attend) -> Block:
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


def _gemma2(module: Any, attend: Attend) -> Block:
    def block(self: Any, x: Any, segment_pos: Any, cache: Any, attn_mask: Any) -> tuple[None, jax.Array]:
        q, k, v = _gemma_projections(self, x)
        rotate = partial(module.apply_rope, positions=segment_pos, head_dim=self.head_dim)
        window, softcap = _gemma_window(module, self), self.attn_logits_soft_cap
        out = attend(rotate(q) * self.head_dim**-0.5, rotate(k), v, window=window, softcap=softcap)
        return None, constrain(self.attn_vec_einsum(out), self.shd_config.act_btd)

    return block


def _gemma_projections(attention: Any, x: jax.Array) -> list[jax.Array]:
    """Query [B, T, N, H], key and value [B, T, K, H] of Gemma 2 and 3."""
    if attention.use_qkv_einsum:
        projected = attention.qkv_einsum(x)
    else:
        projected = (attention.q_einsum(x), *attention.kv_einsum(x))
    return [constrain(one, attention.shd_config.act_btnh) for one in projected]


def _gemma_window(module: Any, attention: Any) -> int | None:
    local = attention.attn_type == module.AttentionType.LOCAL_SLIDING
    return attention.sliding_window_size if local else None


def _llama3(module: Any, attend: Attend) -> Block:
    def block(self: Any, x: Any, segment_pos: Any, cache: Any, attn_mask: Any) -> tuple[None, jax.Array]:
        rotate = partial(module.apply_rope, positions=segment_pos, head_dim=self.head_dim)
        projected = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (constrain(one, self.shd_config.act_btnh) for one in projected)
        out = attend(rotate(q) * self.scale, rotate(k), v)
        return None, constrain(self.o_proj(out), self.shd_config.act_btd)

    return block


def _qwen3(module: Any, attend: Attend) -> Block:
    def block(
        self: Any, x: Any, segment_pos: Any, cache: Any, attn_mask: Any, segment_ids: Any = None
    ) -> tuple[None, jax.Array]:
        rotate = partial(module.apply_rope, positions=segment_pos, head_dim=self.head_dim)
        projected = (self.q_norm(self.q_proj(x)), self.k_norm(self.k_proj(x)), self.v_proj(x))
        q, k, v = (constrain(one, self.shd_config.act_btnh) for one in projected)
        out = attend(rotate(q) * self.scale, rotate(k), v)
        return None, constrain(self.o_proj(out), self.shd_config.act_btd)

    return block


def _qwen2(module: Any, attend: Attend) -> Block:
    def block(
        self: Any, x: Any, cache: Any, attn_mask: Any, sin: Any, cos: Any, segment_ids: Any = None
    ) -> tuple[None, jax.Array]:
        def biased(projected: jax.Array, bias: Any) -> jax.Array:
            heads = bias.get_value().astype(self.config.dtype).reshape(projected.shape[2:])
            return constrain(projected + heads, self.shd_config.act_btnh)

        q = biased(self.q_proj(x), self.q_bias)
        k = biased(self.k_proj(x), self.k_bias)
        v = biased(self.v_proj(x), self.v_bias)
        q, k = (module.apply_rotary_embedding(one, sin, cos) for one in (q, k))
        out = attend(q * self.scale, k, v)
        return None, constrain(self.o_proj(out), self.shd_config.act_btd)

    return block


BLOCKS: dict[str, Callable[[Any, Attend], Block]] = {
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "llama3": _llama3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}
"""By family: (Tunix's module, `splash` for a batch) -> the block."""
