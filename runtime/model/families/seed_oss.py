"""Seed-OSS: Llama's layers, with biases on queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderFamily


class SeedOss(DecoderFamily):
    name = "seed_oss"
    title = "Seed-OSS"
    turn_markers = ("<seed:bos>", "<seed:eos>")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 155_136,
        "hidden_size": 4096,
        "intermediate_size": 27_648,
        "num_hidden_layers": 64,
        "num_attention_heads": 80,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 524_288,
        "attention_bias": True,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
    }
    biased = (("attention_bias", ("q", "k", "v")), ("attention_out_bias", ("o",)), ("mlp_bias", ("mlp",)))


FAMILY = SeedOss()
