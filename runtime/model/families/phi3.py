"""Phi 3, 3.5 and 4, and Phi 4 mini: one tensor for queries, keys and values, and one for gate and up."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily


class Phi3(DecoderFamily):
    name = "phi3"
    title = "Phi 3 and 4"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
    }
    share = 1.0

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, fused=("qkv", "gate_up"), **different)


FAMILY = Phi3()
