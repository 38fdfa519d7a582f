"""Gemma 4: local layers with fused key and value; global layers with their own head size and heads.

In the larger models the keys of global layers also serve as values (attention_k_eq_v): those layers
have `k_einsum` instead of `kv_einsum`, and no v_proj. E2B and E4B share keys and values between
layers and add per-layer embeddings; 26B-A4B has experts in addition to a dense block. 12B (`gemma4_unified`)
has neither, and other tensors for images and sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .base import (
    FULL,
    GEMMA4,
    SLIDING,
    Architecture,
    Family,
    LoraTarget,
    Parameter,
    Source,
    UnsupportedCheckpoint,
    built_in,
    integer,
    listed_types,
    mlp_lora_targets,
    mlp_parameters,
    number,
    plain,
    projection,
    refuse_unlike_tunix,
    section,
    softcap,
    text_config,
)
from .gemma import NORMS, embedding, keys_and_values, norm, output, query, rotary_base

MODEL = "Tunix's Gemma 4"
PER_LAYER = "hidden_size_per_layer_input"
GLOBAL_HEADS = "num_global_key_value_heads"
"""transformers reads this key only if keys serve as values."""
UNIFIED = ("gemma4_unified", "gemma4_unified_text")
"""Model types without per-layer embeddings and experts."""


@dataclass(frozen=True)
class Gemma4Architecture(Architecture):
    """Gemma 4's own sizes.

    Attributes:
        sliding_window: tokens that a token of a local layer sees.
        global_kv_heads, global_head_dim: of the global layers.
        k_eq_v: whether keys serve as values in global layers.
        local_theta, global_theta: rotary base frequencies.
        global_rope_share: the part of a global head's dimensions that is rotated.
        softcap: final logit soft-cap, None for none.
        kv_shared_layers: how many last layers reuse the keys and values of earlier ones.
        shared_intermediate_size: feed-forward width of those layers.
        per_layer_input: width of the per-layer embeddings, 0 for none.
        experts, experts_per_token, expert_size: of the expert block, 0 for none.
    """

    sliding_window: int
    global_kv_heads: int
    global_head_dim: int
    k_eq_v: bool
    local_theta: float
    global_theta: float
    global_rope_share: float
    softcap: float | None
    kv_shared_layers: int
    shared_intermediate_size: int
    per_layer_input: int
    experts: int
    experts_per_token: int
    expert_size: int

    @property
    def routing(self) -> tuple[int, int]:
        return self.experts, self.experts_per_token

    def is_global(self, layer: int) -> bool:
        return self.layer_types[layer] == FULL

    def kv_heads(self, layer: int) -> int:
        return self.global_kv_heads if self.is_global(layer) else self.num_kv_heads

    def layer_head_dim(self, layer: int) -> int:
        """Return the head size of a layer."""
        return self.global_head_dim if self.is_global(layer) else self.head_dim

    def shares_kv(self, layer: int) -> bool:
        """Return whether a layer reuses the keys and values of another layer."""
        return layer >= self.num_layers - self.kv_shared_layers


class Gemma4(Family):
    name = "gemma4"
    title = "Gemma 4"
    model_types = (*UNIFIED, "gemma4", "gemma4_text")
    prefixes = ("model.language_model.", "model.")
    flash_attention = True
    turn_markers = GEMMA4

    def architecture(self, config: Mapping[str, Any]) -> Gemma4Architecture:
        """Read a config.json; a missing key has the default of transformers' config class."""
        text = text_config(config)
        if config.get("model_type") in UNIFIED or text.get("model_type") in UNIFIED:
            text = {PER_LAYER: 0, "sliding_window": 1024, **text}
            for key in (PER_LAYER, "enable_moe_block"):
                built_in(text, key, 0, "Gemma 4 12B")
        refuse_unlike_tunix(config, MODEL)
        layers = integer(text, "num_hidden_layers", 30)
        default = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(layers)]
        types = listed_types(text.get("layer_types") or default, layers)
        types = (*types[:-1], FULL)  # transformers always makes the last layer a full one
        shared = integer(text, "num_kv_shared_layers") if text.get("num_kv_shared_layers") else 0
        if shared and types[: layers - shared][-2:] != (SLIDING, FULL):
            raise UnsupportedCheckpoint(
                f"config.json: num_kv_shared_layers is {shared}; {MODEL} shares what the two layers before "
                "have, which are not a sliding and a full one",
                "num_kv_shared_layers",
            )
        if text.get("use_bidirectional_attention") == "all":
            raise UnsupportedCheckpoint(
                "config.json: Tunix's Gemma 4 is causal; use_bidirectional_attention is 'all'",
                "use_bidirectional_attention",
            )
        local_theta, global_theta, share = _rope(text)
        width = integer(text, "intermediate_size", 9216)
        vocabulary = integer(text, "vocab_size", 262_144)
        per_layer_input = integer(text, PER_LAYER, 256) if text.get(PER_LAYER, 256) else 0
        if per_layer_input:
            built_in(text, "vocab_size_per_layer_input", vocabulary, MODEL)
        moe = bool(text.get("enable_moe_block"))
        experts = integer(text, "num_experts") if moe else 0
        if experts:
            built_in({PER_LAYER: per_layer_input}, PER_LAYER, 0, f"{MODEL} with experts")
        k_eq_v = bool(text.get("attention_k_eq_v"))
        kv_heads = integer(text, "num_key_value_heads", 4)
        return Gemma4Architecture(
            family=self.name,
            vocab_size=vocabulary,
            hidden_size=integer(text, "hidden_size", 2304),
            intermediate_size=width,
            num_heads=integer(text, "num_attention_heads", 8),
            num_kv_heads=kv_heads,
            head_dim=integer(text, "head_dim", 256),
            layer_types=types,
            sliding_window=integer(text, "sliding_window", 512),
            global_kv_heads=integer(text, GLOBAL_HEADS) if k_eq_v and text.get(GLOBAL_HEADS) else kv_heads,
            global_head_dim=integer(text, "global_head_dim", 512),
            k_eq_v=k_eq_v,
            local_theta=local_theta,
            global_theta=global_theta,
            global_rope_share=share,
            softcap=softcap(text, "final_logit_softcapping", None),
            kv_shared_layers=shared,
            shared_intermediate_size=2 * width if text.get("use_double_wide_mlp") else width,
            per_layer_input=per_layer_input,
            experts=experts,
            experts_per_token=integer(text, "top_k_experts") if moe else 0,
            expert_size=integer(text, "moe_intermediate_size") if moe else 0,
        )

    def parameters(self, architecture: Architecture) -> list[Parameter]:
        assert isinstance(architecture, Gemma4Architecture)
        a, d = architecture, architecture.hidden_size
        out = [embedding(a)]
        if a.per_layer_input:
            from .. import gemma4_parts

            out += gemma4_parts.per_layer_embeddings(a)
        for i in range(a.num_layers):
            layer = f"layers.{i}"
            out += _attention(a, i)
            out += mlp_parameters(
                layer, d, a.shared_intermediate_size if a.shares_kv(i) else a.intermediate_size
            )
            if a.experts or a.per_layer_input:
                from .. import gemma4_parts

                out += gemma4_parts.experts(a, layer) if a.experts else []
                out += gemma4_parts.per_layer_input(a, layer) if a.per_layer_input else []
            out += [norm(f"{layer}.{tunix}", f"{layer}.{name}", d) for tunix, name in NORMS]
            scalar = plain(f"{layer}.layer_scalar", (1,))
            out.append(Parameter(f"{layer}.skip_scale", (1,), (None,), (scalar,), buffer=True))
        out.append(norm("final_norm", "norm", d))
        return out

    def lora_targets(self, architecture: Architecture) -> list[LoraTarget]:
        assert isinstance(architecture, Gemma4Architecture)
        out = []
        for i in range(architecture.num_layers):
            attn = f"layers.{i}.attn"
            q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
            out.append(LoraTarget(i, f"{attn}.q_einsum.w", (1,), (q,)))
            if not architecture.shares_kv(i):
                if architecture.k_eq_v and architecture.is_global(i):
                    out.append(LoraTarget(i, f"{attn}.k_einsum.w", (1,), (k,)))
                else:
                    out.append(LoraTarget(i, f"{attn}.kv_einsum.w", (2,), (k, v)))
            out.append(LoraTarget(i, f"{attn}.attn_vec_einsum.w", (0, 1), (o,)))
            out += mlp_lora_targets(i)
        return out

    def expert_targets(self, architecture: Architecture) -> list[LoraTarget]:
        assert isinstance(architecture, Gemma4Architecture)
        if not architecture.experts:
            return []
        from ..gemma4_parts import expert_targets

        return [one for i in range(architecture.num_layers) for one in expert_targets(architecture, i)]

    def tunix_module(self) -> Any:
        from tunix.models.gemma4 import model

        return model

    def replacements(self, architecture: Architecture) -> Sequence[tuple[Any, str, Any]]:
        assert isinstance(architecture, Gemma4Architecture)
        if not architecture.experts:
            return ()
        from ..gemma4_experts import decoder_block, layer

        owner = self.tunix_module().DecoderLayer
        return [(owner, "block", decoder_block), (owner, "__call__", layer)]

    def splash(self, attend: Any) -> Sequence[tuple[Any, str, Any]]:
        from .. import attention_blocks

        module = self.tunix_module()
        return [(module.Attention, "block", attention_blocks.gemma4(module, attend))]

    def tunix_model(self, architecture: Architecture, **settings: Any) -> tuple[type, Any]:
        from tunix.models.gemma4 import model as tunix_gemma4

        assert isinstance(architecture, Gemma4Architecture)
        a = architecture
        kinds = {
            FULL: tunix_gemma4.AttentionType.GLOBAL,
            SLIDING: tunix_gemma4.AttentionType.LOCAL_SLIDING,
        }
        return tunix_gemma4.Gemma4, tunix_gemma4.ModelConfig(
            num_layers=a.num_layers,
            num_embed=a.vocab_size,
            embed_dim=a.hidden_size,
            hidden_dim=a.intermediate_size,
            num_heads=a.num_heads,
            head_dim=a.head_dim,
            num_kv_heads=a.num_kv_heads,
            final_logit_softcap=a.softcap,
            sliding_window_size=a.sliding_window,
            per_layer_input_dim=a.per_layer_input,
            num_global_kv_heads=a.global_kv_heads,
            global_key_size=a.global_head_dim,
            attention_pattern=tuple(kinds[kind] for kind in a.layer_types),
            # Tunix truncates layers - fraction * layers: half a layer less keeps it from rounding down.
            frac_shared_layers=(a.kv_shared_layers - 0.5) / a.num_layers if a.kv_shared_layers else 0.0,
            global_rope_proportion=a.global_rope_share,
            k_eq_v_global=a.k_eq_v,
            override_kv_shared_ffw_hidden=a.shared_intermediate_size,
            local_base_frequency=a.local_theta,
            global_base_frequency=a.global_theta,
            param_dtype=settings["dtype"],
            dtype=settings["dtype"],
            # Splash attention is refused together with the ring cache, which only sampling uses.
            use_sliding_window_kv_cache=False,
            enable_moe=bool(a.experts),
            num_experts=a.experts or None,
            num_experts_per_tok=a.experts_per_token or None,
            expert_dim=a.expert_size or None,
            moe_dense_hidden_dim=a.intermediate_size if a.experts else None,
        )


def _attention(a: Gemma4Architecture, i: int) -> list[Parameter]:
    layer, hf = f"layers.{i}", f"layers.{i}.self_attn"
    d, n, k, h = a.hidden_size, a.num_heads, a.kv_heads(i), a.layer_head_dim(i)
    own_kv = not a.shares_kv(i)
    keys = projection(f"{hf}.k_proj.weight", k, h, d)
    out = [query(layer, n, h, d)]
    if a.k_eq_v and a.is_global(i):
        sources: tuple[Source, ...] = (keys,) if own_kv else ()
        out.append(Parameter(f"{layer}.attn.k_einsum.w", (k, d, h), ("tp", "fsdp", None), sources))
    else:
        sources = (keys, projection(f"{hf}.v_proj.weight", k, h, d)) if own_kv else ()
        out.append(keys_and_values(layer, k, h, d, sources))
    out.append(output(layer, n, h, d))
    out.append(norm(f"{layer}.attn._query_norm", f"{hf}.q_norm", h))
    key_norm = norm(f"{layer}.attn._key_norm", f"{hf}.k_norm", h)
    out.append(key_norm if own_kv else Parameter(key_norm.path, key_norm.shape, key_norm.spec, ()))
    return out


def _rope(text: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return local base, global base, and the rotated share of global heads."""
    parameters = section(text, "rope_parameters")
    full, sliding = section(parameters, FULL), section(parameters, SLIDING)
    built_in(sliding, "rope_type", "default", MODEL)
    if not full:
        share = 0.25
    else:
        built_in({"rope_type": "default", **full}, "rope_type", "proportional", MODEL)
        built_in(full, "factor", 1.0, MODEL)
        share = number(full, "partial_rotary_factor", 1.0)
    return rotary_base(sliding, 10_000), rotary_base(full, 1_000_000), share


FAMILY = Gemma4()
