"""Gemma 3: local and global attention 5:1, one rotary base each, fused key and value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.families.base import (
    Architecture,
    Family,
    Parameter,
    Site,
    UnsupportedCheckpoint,
    built_in,
    integer,
    mlp_parameters,
    mlp_sites,
    number,
    output_projection,
    plain,
    projection,
    refuse_unlike_tunix,
    section,
    text_config,
)

PERIOD = 6
"""Tunix repeats five sliding layers and one full layer."""
MODEL = "Tunix's Gemma 3"


@dataclass(frozen=True)
class Gemma3Architecture(Architecture):
    """Gemma 3's own sizes.

    Attributes:
        sliding_window: tokens that a local layer sees.
        local_theta, global_theta: rotary base frequencies.
        global_scale: linear scaling of positions in global layers.
        query_scale_heads: True when queries are scaled by (hidden_size / heads)^-0.5 (27B) instead
            of head_dim^-0.5.
    """

    sliding_window: int
    local_theta: int
    global_theta: int
    global_scale: float
    query_scale_heads: bool


class Gemma3(Family):
    name = "gemma3"
    model_types = ("gemma3", "gemma3_text")
    prefixes = ("model.language_model.", "language_model.model.", "model.")
    flash_attention = True
    turn_markers = ("<start_of_turn>", "<end_of_turn>")

    def architecture(self, config: Mapping[str, Any]) -> Gemma3Architecture:
        """Reads a config.json; a key that it leaves out has the default of transformers' Gemma3TextConfig
        (the published multimodal checkpoints leave out most)."""
        text = text_config(config)
        refuse_unlike_tunix(config, MODEL)
        built_in(text, "attn_logit_softcapping", None, MODEL)
        built_in(text, "final_logit_softcapping", None, MODEL)
        built_in(text, "use_bidirectional_attention", False, MODEL)
        layers = integer(text, "num_hidden_layers", 26)
        expected = tuple(
            "full_attention" if (i + 1) % PERIOD == 0 else "sliding_attention" for i in range(layers)
        )
        if "layer_types" not in text:
            built_in(text, "sliding_window_pattern", PERIOD, MODEL)
        if tuple(text.get("layer_types") or expected) != expected:
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

    def parameters(self, architecture: Architecture) -> list[Parameter]:
        a = architecture
        d, n, k, h = a.hidden_size, a.num_heads, a.num_kv_heads, a.head_dim
        out = [
            Parameter(
                "embedder.input_embedding",
                (a.vocab_size, d),
                ("tp", "fsdp"),
                (plain("embed_tokens.weight", (a.vocab_size, d)),),
            )
        ]
        for i in range(a.num_layers):
            layer = f"layers.{i}"
            hf = f"{layer}.self_attn"
            q = projection(f"{hf}.q_proj.weight", n, h, d)
            kv = [projection(f"{hf}.{name}_proj.weight", k, h, d) for name in ("k", "v")]
            if n == k:
                out.append(
                    Parameter(
                        f"{layer}.attn.qkv_einsum.w", (3, n, d, h), (None, "tp", "fsdp", None), (q, *kv)
                    )
                )
            else:
                out.append(Parameter(f"{layer}.attn.q_einsum.w", (n, d, h), ("tp", "fsdp", None), (q,)))
                # A single key/value head cannot be split over tp: Tunix replicates it.
                spec = (None, None if k == 1 else "tp", "fsdp", None)
                out.append(Parameter(f"{layer}.attn.kv_einsum.w", (2, k, d, h), spec, tuple(kv)))
            out.append(
                Parameter(
                    f"{layer}.attn.attn_vec_einsum.w",
                    (n, h, d),
                    ("tp", None, "fsdp"),
                    (output_projection(f"{hf}.o_proj.weight", n, h, d),),
                )
            )
            for tunix, name in (("_query_norm", "q_norm"), ("_key_norm", "k_norm")):
                source = plain(f"{hf}.{name}.weight", (h,))
                out.append(Parameter(f"{layer}.attn.{tunix}.scale", (h,), (None,), (source,)))
            out += mlp_parameters(layer, d, a.intermediate_size)
            for tunix, name in (
                ("pre_attention_norm", "input_layernorm"),
                ("post_attention_norm", "post_attention_layernorm"),
                ("pre_ffw_norm", "pre_feedforward_layernorm"),
                ("post_ffw_norm", "post_feedforward_layernorm"),
            ):
                source = plain(f"{layer}.{name}.weight", (d,))
                out.append(Parameter(f"{layer}.{tunix}.scale", (d,), ("tp",), (source,)))
        out.append(Parameter("final_norm.scale", (d,), ("tp",), (plain("norm.weight", (d,)),)))
        return out

    def sites(self, architecture: Architecture) -> list[Site]:
        out = []
        for i in range(architecture.num_layers):
            attn = f"layers.{i}.attn"
            q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
            if architecture.num_heads == architecture.num_kv_heads:
                out.append(Site(i, f"{attn}.qkv_einsum.w", (2,), (q, k, v)))
            else:
                out.append(Site(i, f"{attn}.q_einsum.w", (1,), (q,)))
                out.append(Site(i, f"{attn}.kv_einsum.w", (2,), (k, v)))
            out.append(Site(i, f"{attn}.attn_vec_einsum.w", (0, 1), (o,)))
            out += mlp_sites(i)
        return out

    def tunix_module(self) -> Any:
        from tunix.models.gemma3 import model

        return model

    def replacements(self, architecture: Architecture) -> Sequence[tuple[Any, str, Any]]:
        from runtime.norms import offset_rms_norm

        # Tunix's own computes in the model's dtype, transformers' in float32.
        return [(self.tunix_module().RMSNorm, "__call__", offset_rms_norm)]

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


def _rope(text: Mapping[str, Any]) -> tuple[int, int, float]:
    """Local base, global base and global scale, from either spelling of transformers."""
    parameters = section(text, "rope_parameters")
    if parameters:
        full, sliding = section(parameters, "full_attention"), section(parameters, "sliding_attention")
        built_in(sliding, "rope_type", "default", MODEL)
        local, theta = number(sliding, "rope_theta", 10_000), number(full, "rope_theta", 1_000_000)
    else:
        full = section(text, "rope_scaling")
        local = number(text, "rope_local_base_freq", 10_000)
        theta = number(text, "rope_theta", 1_000_000)
    kind = full.get("rope_type", full.get("type", "default"))
    if kind not in ("default", "linear"):
        raise UnsupportedCheckpoint(
            f"config.json: rope scaling {kind!r}; {MODEL} has linear scaling alone", "rope_scaling"
        )
    return int(local), int(theta), float(number(full, "factor", 1.0)) if kind == "linear" else 1.0
