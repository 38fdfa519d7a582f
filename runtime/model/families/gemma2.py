"""Gemma 2: local and global layers alternate, attention scores and logits are soft-capped, no query/key norm.

Tunix has it in its module of Gemma 1 and 2. That module differs from the published model in three ways, which
are replaced while it is traced. Local layers compute their window from positions, which is wrong if packing
restarts positions within a row. Queries are scaled only by head_dim, and the rotary base is fixed (27B scales
differently). Norms are computed in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from .base import (
    FULL,
    GEMMA,
    SLIDING,
    Architecture,
    Family,
    LoraTarget,
    Parameter,
    built_in,
    integer,
    listed_types,
    mlp_parameters,
    number,
    refuse_unlike_tunix,
    section,
    softcap,
    text_config,
)
from .gemma import embedding, norm
from .gemma_fused import fused_attention, fused_lora_targets

MODEL = "Tunix's Gemma 2"
TUNIX_THETA = 10_000
"""The rotary base that is built into Tunix's model."""
NORMS = (
    ("pre_attention_norm", "input_layernorm"),
    ("post_attn_norm", "post_attention_layernorm"),
    ("pre_ffw_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
"""A layer's norms: Tunix's name and Hugging Face's."""


@dataclass(frozen=True)
class Gemma2Architecture(Architecture):
    """Gemma 2's own sizes.

    Attributes:
        sliding_window: tokens that a token of a local layer sees.
        theta: rotary base frequency.
        query_scalar: attention scores are divided by its square root.
        attention_softcap, softcap: of attention scores and of final logits, None for none.
    """

    sliding_window: int
    theta: float
    query_scalar: float
    attention_softcap: float | None
    softcap: float | None


class Gemma2(Family):
    name = "gemma2"
    title = "Gemma 2"
    caps_in_float32 = False
    eager = True
    prefixes = ("model.",)
    flash_attention = True
    turn_markers = GEMMA

    def architecture(self, config: Mapping[str, Any]) -> Gemma2Architecture:
        """Read a config.json; a missing key has the default of transformers' Gemma2Config."""
        text = text_config(config)
        refuse_unlike_tunix(config, MODEL)
        built_in(text, "use_bidirectional_attention", False, MODEL)
        layers = integer(text, "num_hidden_layers", 26)
        default = [FULL if i % 2 else SLIDING for i in range(layers)]
        rope = section(text, "rope_parameters") or section(text, "rope_scaling")
        built_in({"rope_type": rope.get("rope_type", rope.get("type"))}, "rope_type", "default", MODEL)
        return Gemma2Architecture(
            family=self.name,
            vocab_size=integer(text, "vocab_size", 256_000),
            hidden_size=integer(text, "hidden_size", 2304),
            intermediate_size=integer(text, "intermediate_size", 9216),
            num_heads=integer(text, "num_attention_heads", 8),
            num_kv_heads=integer(text, "num_key_value_heads", 4),
            head_dim=integer(text, "head_dim", 256),
            layer_types=listed_types(text.get("layer_types") or default, layers),
            sliding_window=integer(text, "sliding_window", 4096),
            theta=number(rope if "rope_theta" in rope else text, "rope_theta", TUNIX_THETA),
            query_scalar=number(text, "query_pre_attn_scalar", 256),
            attention_softcap=softcap(text, "attn_logit_softcapping", 50.0),
            softcap=softcap(text, "final_logit_softcapping", 30.0),
        )

    def norm_offset(self, architecture: Architecture) -> float:
        return 1.0

    def parameters(self, architecture: Architecture) -> list[Parameter]:
        d = architecture.hidden_size
        out = [embedding(architecture)]
        for i in range(architecture.num_layers):
            layer = f"layers.{i}"
            out += fused_attention(architecture, layer)
            out += mlp_parameters(layer, d, architecture.intermediate_size)
            out += [norm(f"{layer}.{tunix}", f"{layer}.{name}", d) for tunix, name in NORMS]
        out.append(norm("final_norm", "norm", d))
        return out

    def lora_targets(self, architecture: Architecture) -> list[LoraTarget]:
        return fused_lora_targets(architecture)

    def tunix_module(self) -> Any:
        from tunix.models.gemma import model

        return model

    def replacements(self, architecture: Architecture) -> Sequence[tuple[Any, str, Any]]:
        import jax
        import jax.numpy as jnp

        from ..norms import offset_rms_norm

        assert isinstance(architecture, Gemma2Architecture)
        module = self.tunix_module()
        theta, apply_rope = architecture.theta, module.apply_rope
        # Tunix multiplies rotated queries by head_dim^-0.5 and does not scale keys. Both pass through
        # apply_rope, and a factor on both becomes its square in their products.
        factor = (architecture.head_dim / architecture.query_scalar) ** 0.25

        def rope(inputs: jax.Array, positions: jax.Array, head_dim: int) -> jax.Array:
            rotated = apply_rope(inputs.astype(jnp.float32), positions, head_dim, theta)
            return (rotated * factor).astype(inputs.dtype)

        def window(segment_pos: jax.Array, cache_len: int, sliding_window_size: int) -> jax.Array:
            """Return bool[1, T, T]: keys that are closer than the window, by their place in the row."""
            query, key = jnp.arange(segment_pos.shape[1])[:, None], jnp.arange(cache_len)[None]
            return (jnp.abs(query - key) < sliding_window_size)[None]

        out = [
            (module, "_create_sliding_mask", window),
            (module.RMSNorm, "__call__", offset_rms_norm),
        ]
        if factor != 1.0 or theta != TUNIX_THETA:
            out.append((module, "apply_rope", rope))
        return out

    def splash(self, attend: Any) -> Sequence[tuple[Any, str, Any]]:
        from .. import attention_blocks

        module = self.tunix_module()
        return [(module.Attention, "block", attention_blocks.gemma2(module, attend))]

    def tunix_model(self, architecture: Architecture, **settings: Any) -> tuple[Any, Any]:
        from tunix.models.gemma import model as tunix_gemma

        assert isinstance(architecture, Gemma2Architecture)
        a = architecture
        kinds = {
            FULL: tunix_gemma.AttentionType.GLOBAL,
            SLIDING: tunix_gemma.AttentionType.LOCAL_SLIDING,
        }
        # Tunix's ModelConfig has no dtype here, and makes every parameter float32.
        return partial(_in_dtype, tunix_gemma.Gemma, settings["dtype"]), tunix_gemma.ModelConfig(
            num_layers=a.num_layers,
            num_embed=a.vocab_size,
            embed_dim=a.hidden_size,
            hidden_dim=a.intermediate_size,
            num_heads=a.num_heads,
            head_dim=a.head_dim,
            num_kv_heads=a.num_kv_heads,
            final_logit_softcap=a.softcap,
            use_post_attn_norm=True,
            use_post_ffw_norm=True,
            attention_types=tuple(kinds[kind] for kind in a.layer_types),
            attn_logits_soft_cap=a.attention_softcap,
            sliding_window_size=a.sliding_window,
        )


def _in_dtype(model_class: type, dtype: Any, config: Any, *, rngs: Any) -> Any:
    """Make a model with its parameters in a dtype, for a ModelConfig without one."""
    from flax import nnx

    model = model_class(config, rngs=rngs)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Param):
            node.set_raw_value(node.get_raw_value().astype(dtype))
    return model


FAMILY = Gemma2()
