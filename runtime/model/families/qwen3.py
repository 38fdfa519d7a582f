"""Qwen 3, dense: norms of each head's queries and keys; an optional window in late layers. The language model
of Qwen 3 VL is one whose heads turn by time, row and column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderArchitecture, DecoderFamily, windowed_late
from .family import CHATML, text_config
from .multimodal_rope import by_axes

VL = ("qwen3_vl", "qwen3_vl_text")
VL_DEFAULTS = {"max_position_embeddings": 128_000, "rope_theta": 500_000.0}
"""Defaults of Qwen 3 VL, where they differ."""


class Qwen3(DecoderFamily):
    name = "qwen3"
    title = "Qwen 3"
    model_types = (*VL, "qwen3")
    prefixes = MULTIMODAL
    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }

    def architecture(self, config: Mapping[str, Any]) -> DecoderArchitecture:
        text = text_config(config)
        if text.get("model_type") not in VL and config.get("model_type") not in VL:
            return super().architecture(config)
        text = {**VL_DEFAULTS, **text, "use_sliding_window": False}
        whole = text if text_config(config) is config else {**config, "text_config": text}
        return by_axes(super().architecture(whole), text, (24, 20, 20))

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, qk_norm="head", **different)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return windowed_late(config)


FAMILY = Qwen3()
