"""OLMoE: experts in every layer, norms over all queries and all keys of a token at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Experts, chosen, flag
from .family import UnsupportedCheckpoint, integer


class Olmoe(DecoderFamily):
    name = "olmoe"
    title = "OLMoE"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50_304,
        "hidden_size": 2048,
        "intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "num_experts_per_tok": 8,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        if config.get("clip_qkv") is not None:
            raise UnsupportedCheckpoint(
                f"config.json: clip_qkv is {config['clip_qkv']!r}; {self.title} has no limits here",
                "clip_qkv",
            )
        experts = Experts(
            *chosen(config, 64),
            size=integer(config, "intermediate_size"),
            normalized=flag(config, "norm_topk_prob"),
        )
        return super().describe(config, qk_norm="row", experts=experts, **different)


FAMILY = Olmoe()
