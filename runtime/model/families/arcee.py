"""Arcee's AFM: Llama's layers, with a plain feed-forward block of squared ReLUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Names


class Arcee(DecoderFamily):
    name = "arcee"
    title = "AFM"
    names = Names(plain=("up_proj", "down_proj"))
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32_000,
        "hidden_size": 2560,
        "intermediate_size": 18_432,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
        "hidden_act": "relu2",
        "rms_norm_eps": 1e-5,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(config, gated=False, **different)


FAMILY = Arcee()
