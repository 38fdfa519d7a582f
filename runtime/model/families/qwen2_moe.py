"""Qwen 1.5 and 2 with experts, plus one expert with its own gate that every token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import (
    DecoderArchitecture,
    DecoderFamily,
    Experts,
    chosen,
    flag,
    routed_every,
    windowed_as_listed,
)
from .family import CHATML, FULL, SLIDING, integer


class Qwen2Moe(DecoderFamily):
    name = "qwen2_moe"
    title = "Qwen 1.5 and 2 MoE"
    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "qkv_bias": True,
    }
    biased = (("qkv_bias", ("q", "k", "v")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        experts = Experts(
            *chosen(config, 60),
            size=integer(config, "moe_intermediate_size"),
            normalized=flag(config, "norm_topk_prob"),
            shared=integer(config, "shared_expert_intermediate_size"),
            shared_gate=True,
        )
        return super().describe(config, experts=experts, routed=routed_every(config), **different)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Return transformers' layer types: an enabled window is in every second one of the first
        `max_window_layers` layers, counted from the first layer."""
        layers = integer(config, "num_hidden_layers")
        used = flag(config, "use_sliding_window")
        if config.get("layer_types") is not None:
            return windowed_as_listed(config, used)
        last = integer(config, "max_window_layers")
        return tuple(SLIDING if used and i < last and i % 2 == 0 else FULL for i in range(layers))


FAMILY = Qwen2Moe()
