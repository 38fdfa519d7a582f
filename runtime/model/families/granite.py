"""Granite 3: Llama's layers with four multipliers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily
from .family import number


class Granite(DecoderFamily):
    name = "granite"
    title = "Granite"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, **_multipliers(config), **different)


def _multipliers(config: Mapping[str, Any]) -> dict[str, float]:
    """Return the multipliers as fields of a description."""
    return {
        "attention_scale": number(config, "attention_multiplier", 1.0),
        "embedding_scale": number(config, "embedding_multiplier", 1.0),
        "residual_scale": number(config, "residual_multiplier", 1.0),
        "logit_scale": 1 / number(config, "logits_scaling", 1.0),
    }


FAMILY = Granite()
