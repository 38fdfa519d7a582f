"""Qwen 2 and 2.5, dense: biases on queries, keys and values; an optional window in late layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import CHATML
from .decoder import DecoderFamily, windowed_late


class Qwen2(DecoderFamily):
    name = "qwen2"
    title = "Qwen 2.5"
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

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return windowed_late(config)


FAMILY = Qwen2()
