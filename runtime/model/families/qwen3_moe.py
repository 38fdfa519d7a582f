"""Qwen 3 with experts: all feed-forward blocks, or most of them, are experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Experts, chosen, flag, routed_every
from .family import CHATML, FULL, SLIDING, integer


class Qwen3Moe(DecoderFamily):
    name = "qwen3_moe"
    title = "Qwen 3 MoE"
    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        experts = Experts(
            *chosen(config, 128),
            size=integer(config, "moe_intermediate_size"),
            normalized=flag(config, "norm_topk_prob"),
        )
        routed = routed_every(config)
        return super().describe(config, qk_norm="head", experts=experts, routed=routed, **different)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Put an enabled window in all layers, as transformers does, which ignores `max_window_layers`."""
        used = flag(config, "use_sliding_window") and config.get("sliding_window") is not None
        return (SLIDING if used else FULL,) * integer(config, "num_hidden_layers")


FAMILY = Qwen3Moe()
