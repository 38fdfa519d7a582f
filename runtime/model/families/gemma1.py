"""Gemma 1 and CodeGemma: norms hold the difference from 1, embeddings are scaled by sqrt(hidden_size)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Norm, number
from .family import GEMMA, built_in, integer


class Gemma1(DecoderFamily):
    name = "gemma1"
    title = "Gemma"
    model_types = ("gemma",)
    turn_markers = GEMMA
    scaled_embedding = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256_000,
        "hidden_size": 3072,
        "intermediate_size": 24_576,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "use_bidirectional_attention", False, self.title)
        norm = Norm(number(config, "rms_norm_eps", 1e-6), offset=1.0, wide=True)
        scale = integer(config, "hidden_size") ** 0.5
        return super().describe(config, norm=norm, embedding_scale=scale, **different)


FAMILY = Gemma1()
