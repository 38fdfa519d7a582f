"""Qwen 3.5, dense: three of four layers are gated delta nets, the fourth is gated attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderArchitecture
from .gated_delta import SECTIONS, SIZES, GatedDeltaFamily
from .multimodal_rope import by_axes


class Qwen3_5(GatedDeltaFamily):
    name = "qwen3_5"
    title = "Qwen 3.5"
    model_types = ("qwen3_5", "qwen3_5_text")
    prefixes = MULTIMODAL
    defaults: ClassVar[Mapping[str, Any]] = {
        **SIZES,
        "vocab_size": 248_320,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return by_axes(super().describe(config, **different), config, SECTIONS)


FAMILY = Qwen3_5()
