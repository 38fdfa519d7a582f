"""Qwen 3, dense: norms of each head's queries and keys; an optional window in late layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .base import CHATML
from .decoder import DecoderArchitecture, DecoderFamily, windowed_late


class Qwen3(DecoderFamily):
    name = "qwen3"
    title = "Qwen 3"
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

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, qk_norm="head", **different)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return windowed_late(config)


FAMILY = Qwen3()
