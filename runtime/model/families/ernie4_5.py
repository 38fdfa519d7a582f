"""ERNIE 4.5, dense: Llama's layers, whose features rotate with their neighbors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderFamily


class Ernie45(DecoderFamily):
    name = "ernie4_5"
    title = "ERNIE 4.5"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 103_424,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 18,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
    }
    interleaved = True
    biased = (("use_bias", ("q", "k", "v", "o", "mlp")),)


FAMILY = Ernie45()
