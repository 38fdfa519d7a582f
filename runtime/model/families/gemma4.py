"""Gemma 4: global layers with their own heads, whose keys may also be values.

E2B and E4B share keys and values between layers and have embeddings for each layer. 26B-A4B has experts next
to a dense block. 12B (`gemma4_unified`) has neither, and other tensors for images and sound.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from ..rope import Rope
from .decoder_family import AROUND, DecoderArchitecture, Experts, ExpertTensors, FullHeads, flag
from .family import (
    FULL,
    GEMMA4,
    SLIDING,
    UnsupportedCheckpoint,
    built_in,
    count,
    integer,
    listed_types,
    section,
    text_config,
)
from .gemma import Gemma
from .rotary import read_rope

PER_LAYER = "hidden_size_per_layer_input"
GLOBAL_HEADS = "num_global_key_value_heads"
SHARED = "num_kv_shared_layers"
UNIFIED = ("gemma4_unified", "gemma4_unified_text")
"""Model types without per-layer embeddings and experts."""
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}
"""The rotations of a config.json without `rope_parameters`."""
TENSORS = ExpertTensors(
    block="",
    router="router.proj",
    together=("experts.gate_up_proj", "experts.down_proj"),
    apart=False,
    linear_router=True,
)
WITH_EXPERTS = replace(
    AROUND,
    before_experts="pre_feedforward_layernorm_2",
    after_experts="post_feedforward_layernorm_2",
    after_dense="post_feedforward_layernorm_1",
)


class Gemma4(Gemma):
    name = "gemma4"
    title = "Gemma 4"
    model_types = (*UNIFIED, "gemma4", "gemma4_text")
    prefixes = ("model.language_model.", "model.")
    turn_markers = GEMMA4
    offset = 0.0
    share = 1.0
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 262_144,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 30,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "global_head_dim": 512,
        "max_position_embeddings": 131_072,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        PER_LAYER: 256,
        "vocab_size_per_layer_input": 262_144,
        "tie_word_embeddings": True,
    }

    def architecture(self, config: Mapping[str, Any]) -> DecoderArchitecture:
        text = text_config(config)
        if {config.get("model_type"), text.get("model_type")} & {*UNIFIED}:
            for key in (PER_LAYER, "enable_moe_block"):
                built_in(text, key, 0, "Gemma 4 12B")
            text = {"sliding_window": 1024, **text, PER_LAYER: 0}
            config = text if text_config(config) is config else {**config, "text_config": text}
        return super().architecture(config)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        if config.get("use_bidirectional_attention") == "all":
            raise UnsupportedCheckpoint(
                "config.json: use_bidirectional_attention is 'all'; Gemma 4 is causal here",
                "use_bidirectional_attention",
            )
        per_layer, experts = count(config, PER_LAYER), _experts(config)
        if per_layer:
            built_in(config, "vocab_size_per_layer_input", integer(config, "vocab_size"), self.title)
        if experts is not None:
            built_in(config, PER_LAYER, 0, f"{self.title} with experts")
        wide = 2 * integer(config, "intermediate_size") if flag(config, "use_double_wide_mlp") else 0
        a = super().describe(
            config,
            places=AROUND if experts is None else WITH_EXPERTS,
            qk_norm="head",
            value_norm=True,
            attention_scale=1.0,
            full_heads=_full_heads(config),
            kv_shared_layers=count(config, SHARED),
            wide_mlp=wide,
            per_layer_input=per_layer,
            layer_scalar=True,
            experts=experts,
            **different,
        )
        unshared = a.layer_types[: max(0, a.num_layers - a.kv_shared_layers)]
        if missing := {*a.layer_types} - {*unshared}:
            raise UnsupportedCheckpoint(
                f"config.json: {SHARED} is {a.kv_shared_layers}; no layer before those is of {min(missing)}, "
                "whose keys and values they could use",
                SHARED,
            )
        return a

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        layers = integer(config, "num_hidden_layers")
        default = [SLIDING if (i + 1) % 6 else FULL for i in range(layers)]
        types = listed_types(config.get("layer_types") or default, layers)
        return (*types[:-1], FULL)  # transformers always makes the last layer a full one

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        sections = section(config, "rope_parameters") or ROPES
        out = {}
        for kind in dict.fromkeys(kinds):
            size = integer(config, "global_head_dim") if kind == FULL else head_dim
            alone = {**config, "rope_parameters": section(sections, kind) or ROPES[kind]}
            out[kind] = read_rope(alone, self.title, head_dim=size, share=self.share)
        return out


def _full_heads(config: Mapping[str, Any]) -> FullHeads:
    """Read the heads of global layers; transformers has a number of their own only if keys are values."""
    same, kv_heads = flag(config, "attention_k_eq_v"), integer(config, "num_key_value_heads")
    if same and config.get(GLOBAL_HEADS) is not None:
        kv_heads = integer(config, GLOBAL_HEADS)
    return FullHeads(kv_heads, integer(config, "global_head_dim"), same)


def _experts(config: Mapping[str, Any]) -> Experts | None:
    if not flag(config, "enable_moe_block"):
        return None
    return Experts(
        count=integer(config, "num_experts"),
        per_token=integer(config, "top_k_experts"),
        size=integer(config, "moe_intermediate_size"),
        scores="chosen",
        balanced=False,
        added=True,
        tensors=TENSORS,
    )


FAMILY = Gemma4()
