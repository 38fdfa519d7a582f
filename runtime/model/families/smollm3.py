"""SmolLM 3: every fourth layer does not rotate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, flag, turning
from .family import FULL, SLIDING


class SmolLM3(DecoderFamily):
    name = "smollm3"
    title = "SmolLM 3"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 128_256,
        "hidden_size": 2048,
        "intermediate_size": 11_008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "rope_theta": 2_000_000.0,
        "no_rope_layer_interval": 4,
        "tie_word_embeddings": True,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, turns=turning(config), **different)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        windowed = flag(config, "use_sliding_window") and config.get("sliding_window") is not None
        if config.get("layer_types") is not None:
            types = super().layer_types(config)
            return types if windowed else (FULL,) * len(types)
        return tuple(SLIDING if windowed and not turns else FULL for turns in turning(config))


FAMILY = SmolLM3()
