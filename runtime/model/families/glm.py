"""GLM 4 of 2024 in transformers' layout (glm-4-9b-chat-hf), and GLM Edge: part of a head rotates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily


class Glm(DecoderFamily):
    name = "glm"
    title = "GLM 4 of 2024"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 13_696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "attention_bias": True,
        "max_position_embeddings": 131_072,
    }
    share = 0.5
    interleaved = True
    biased = (("attention_bias", ("q", "k", "v")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, fused=("gate_up",), **different)


FAMILY = Glm()
