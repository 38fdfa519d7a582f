"""Qwen 2 and 2.5, dense: biases on queries, keys and values; an optional window in late layers. The language
models of Qwen 2 VL and 2.5 VL are some whose heads turn by time, row and column."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderArchitecture, DecoderFamily, windowed_late
from .family import CHATML, text_config
from .multimodal_rope import by_axes

VL = ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text")
VL_DEFAULTS = {
    **{"vocab_size": 152_064, "hidden_size": 8192, "intermediate_size": 29_568, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "max_window_layers": 80},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1_000_000.0},
}
"""Defaults of Qwen 2 VL and 2.5 VL, where they differ."""


class Qwen2(DecoderFamily):
    name = "qwen2"
    title = "Qwen 2.5"
    model_types = (*VL, "qwen2")
    prefixes = MULTIMODAL
    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 22_016,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    }
    biased = (("", ("q", "k", "v")),)  # attention_bias has no effect here

    def architecture(self, config: Mapping[str, Any]) -> DecoderArchitecture:
        text = text_config(config)
        if text.get("model_type") not in VL and config.get("model_type") not in VL:
            return super().architecture(config)
        text = {**VL_DEFAULTS, **text}
        whole = text if text_config(config) is config else {**config, "text_config": text}
        return by_axes(super().architecture(whole), text)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return windowed_late(config)


FAMILY = Qwen2()
