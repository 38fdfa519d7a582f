"""OLMo 1: layer norms without weights, and an optional limit on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Norm, number

EPS = 1e-5
"""Built into transformers' OlmoLayerNorm."""


class Olmo(DecoderFamily):
    name = "olmo"
    title = "OLMo 1"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }
    biased = (("attention_bias", ("q", "k", "v", "o")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        clip = config.get("clip_qkv")
        return super().describe(
            config,
            norm=Norm(EPS, centered=True, weighted=False),
            clip=None if clip is None else number(config, "clip_qkv", 1.0),
            **different,
        )


FAMILY = Olmo()
