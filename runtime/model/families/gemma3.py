"""Gemma 3: five local layers to one global layer, each kind with its rotary base; keys and values fused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .base import (
    FULL,
    GEMMA,
    SLIDING,
    Architecture,
    Family,
    LoraTarget,
    Parameter,
    UnsupportedCheckpoint,
    built_in,
    integer,
    mlp_parameters,
    number,
    refuse_unlike_tunix,
    section,
    text_config,
)
from .gemma import NORMS, embedding, norm, rotary_base
from .gemma_fused import fused_attention, fused_lora_targets

PERIOD = 6
"""Tunix repeats five sliding layers and one full layer."""
MODEL = "Tunix's Gemma 3"


@dataclass(frozen=True)
class Gemma3Architecture(Architecture):
    """Gemma 3's own sizes.

    Attributes:
        sliding_window: tokens that a token of a local layer sees.
        local_theta, global_theta: rotary base frequencies.
        global_scale: linear scaling of positions in global layers.
        query_scale_heads: True when queries are scaled by (hidden_size / heads)^-0.5 (27B) instead
            of head_dim^-0.5.
    """

    sliding_window: int
    local_theta: float
    global_theta: float
    global_scale: float
    query_scale_heads: bool


class Gemma3(Family):
    name = "gemma3"
    title = "Gemma 3"
    model_types = ("gemma3", "gemma3_text")
    prefixes = ("model.language_model.", "language_model.model.", "model.")
    flash_attention = True
    turn_markers = GEMMA

    def architecture(self, config: Mapping[str, Any]) -> Gemma3Architecture:
        """Read a config.json; a missing key has the default of transformers' Gemma3TextConfig (the published
        multimodal checkpoints omit most keys)."""
        text = text_config(config)
        refuse_unlike_tunix(config, MODEL)
        built_in(text, "attn_logit_softcapping", None, MODEL)
        built_in(text, "final_logit_softcapping", None, MODEL)
        built_in(text, "use_bidirectional_attention", False, MODEL)
        layers = integer(text, "num_hidden_layers", 26)
        expected = tuple(FULL if (i + 1) % PERIOD == 0 else SLIDING for i in range(layers))
        types = text.get("layer_types")
        if types is None:
            built_in(text, "sliding_window_pattern", PERIOD, MODEL)
        elif not isinstance(types, list | tuple) or tuple(types) != expected:
            raise UnsupportedCheckpoint(
                "config.json: layer_types is not five sliding layers and one full layer repeated, "
                "the only pattern of Tunix's Gemma 3",
                "layer_types",
            )
        hidden, heads = integer(text, "hidden_size", 2304), integer(text, "num_attention_heads", 8)
        head_dim = integer(text, "head_dim", 256)
        scalar = text.get("query_pre_attn_scalar", 256)
        if scalar not in (head_dim, hidden // heads):
            raise UnsupportedCheckpoint(
                f"config.json: query_pre_attn_scalar is {scalar}; Tunix's Gemma 3 knows "
                f"head_dim ({head_dim}) and hidden_size / heads ({hidden // heads})",
                "query_pre_attn_scalar",
            )
        local_theta, global_theta, scale = _rope(text)
        return Gemma3Architecture(
            family=self.name,
            vocab_size=integer(text, "vocab_size", 262_208),
            hidden_size=hidden,
            intermediate_size=integer(text, "intermediate_size", 9216),
            num_heads=heads,
            num_kv_heads=integer(text, "num_key_value_heads", 4),
            head_dim=head_dim,
            layer_types=expected,
            sliding_window=integer(text, "sliding_window", 4096),
            local_theta=local_theta,
            global_theta=global_theta,
            global_scale=scale,
            query_scale_heads=scalar != head_dim,
        )

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        """Scale queries as the original does, with a number that the other way of scaling does not give."""
        if not self.architecture(config).query_scale_heads:
            return {}
        head_dim, per_head = small["head_dim"], small["hidden_size"] // small["num_attention_heads"]
        return {
            "query_pre_attn_scalar": per_head,
            "head_dim": 2 * head_dim if head_dim == per_head else head_dim,
        }

    def norm_offset(self, architecture: Architecture) -> float:
        return 1.0

    def parameters(self, architecture: Architecture) -> list[Parameter]:
        a, d, h = architecture, architecture.hidden_size, architecture.head_dim
        out = [embedding(a)]
        for i in range(a.num_layers):
            layer = f"layers.{i}"
            out += fused_attention(a, layer)
            for tunix, name in (("_query_norm", "q_norm"), ("_key_norm", "k_norm")):
                out.append(norm(f"{layer}.attn.{tunix}", f"{layer}.self_attn.{name}", h, None))
            out += mlp_parameters(layer, d, a.intermediate_size)
            out += [norm(f"{layer}.{tunix}", f"{layer}.{name}", d) for tunix, name in NORMS]
        out.append(norm("final_norm", "norm", d))
        return out

    def lora_targets(self, architecture: Architecture) -> list[LoraTarget]:
        return fused_lora_targets(architecture)

    def tunix_module(self) -> Any:
        from tunix.models.gemma3 import model

        return model

    def replacements(self, architecture: Architecture) -> Sequence[tuple[Any, str, Any]]:
        from ..norms import offset_rms_norm

        # Tunix's own norm computes in the model's dtype, transformers' in float32.
        return [(self.tunix_module().RMSNorm, "__call__", offset_rms_norm)]

    def splash(self, attend: Any) -> Sequence[tuple[Any, str, Any]]:
        from .. import attention_blocks

        module = self.tunix_module()
        return [(module.Attention, "block", attention_blocks.gemma3(module, attend))]

    def tunix_model(self, architecture: Architecture, **settings: Any) -> tuple[type, Any]:
        from tunix.models.gemma3 import model as tunix_gemma3

        assert isinstance(architecture, Gemma3Architecture)
        a = architecture
        scaling = tunix_gemma3.QueryPreAttentionNormalisation
        return tunix_gemma3.Gemma3, tunix_gemma3.ModelConfig(
            num_layers=a.num_layers,
            num_embed=a.vocab_size,
            embed_dim=a.hidden_size,
            hidden_dim=a.intermediate_size,
            num_heads=a.num_heads,
            head_dim=a.head_dim,
            num_kv_heads=a.num_kv_heads,
            sliding_window_size=a.sliding_window,
            local_base_frequency=a.local_theta,
            global_base_frequency=a.global_theta,
            global_scale_factor=a.global_scale,
            query_pre_attn_norm=(
                scaling.BY_ONE_OVER_SQRT_EMBED_DIM_DIV_NUM_HEADS
                if a.query_scale_heads
                else scaling.BY_ONE_OVER_SQRT_HEAD_DIM
            ),
            param_dtype=settings["dtype"],
        )


def _rope(text: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return local base, global base and global scale, from either spelling of transformers."""
    parameters = section(text, "rope_parameters")
    if parameters:
        full, sliding = section(parameters, FULL), section(parameters, SLIDING)
        built_in(sliding, "rope_type", "default", MODEL)
        local, theta = rotary_base(sliding, 10_000), rotary_base(full, 1_000_000)
    else:
        full = section(text, "rope_scaling")
        local = rotary_base(text, 10_000, "rope_local_base_freq")
        theta = rotary_base(text, 1_000_000)
    kind = full.get("rope_type", full.get("type", "default"))
    if kind not in ("default", "linear"):
        raise UnsupportedCheckpoint(
            f"config.json: rope scaling {kind!r}; {MODEL} supports only linear scaling", "rope_scaling"
        )
    return local, theta, number(full, "factor", 1.0) if kind == "linear" else 1.0


FAMILY = Gemma3()
