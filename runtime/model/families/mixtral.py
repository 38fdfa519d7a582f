"""Mixtral 8x7B and 8x22B: Mistral's layers with eight experts each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Experts, ExpertTensors, chosen
from .family import integer

TENSORS = ExpertTensors(
    block="block_sparse_moe",
    expert=("experts.{}.w1.weight", "experts.{}.w3.weight", "experts.{}.w2.weight"),
    held="mlp",
)


class Mixtral(DecoderFamily):
    name = "mixtral"
    title = "Mixtral"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts_per_tok": 2,
    }
    biased = ()

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        size = integer(config, "intermediate_size")
        experts = Experts(*chosen(config, 8), size=size, normalized=True, tensors=TENSORS)
        return super().describe(config, experts=experts, **different)


FAMILY = Mixtral()
