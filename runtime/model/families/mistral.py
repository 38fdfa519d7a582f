"""Mistral 7B with its window, Nemo, Small, and models based on them: Zephyr, Codestral, Mathstral."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderFamily


class Mistral(DecoderFamily):
    name = "mistral"
    title = "Mistral"
    wrappers = ("mistral3", "llava", "llava_next")
    prefixes = MULTIMODAL
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "sliding_window": 4096,
    }


FAMILY = Mistral()
