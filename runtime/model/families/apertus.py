"""Apertus: a plain feed-forward block whose activation has learned parameters, and norms of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Names, Places
from .family import section

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
"""The default of transformers' ApertusConfig without `rope_parameters`."""


class Apertus(DecoderFamily):
    name = "apertus"
    title = "Apertus"
    names = Names(plain=("up_proj", "down_proj"))
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 65_536,
        "hidden_act": "xielu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 12_000_000.0,
    }
    biased = (("attention_bias", ("q", "k", "v", "o")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        if not section(config, "rope_scaling") and not section(config, "rope_parameters"):
            config = {**config, "rope_parameters": {**LLAMA3, "rope_theta": config["rope_theta"]}}
        return super().describe(
            config,
            places=Places("attention_layernorm", before_mlp="feedforward_layernorm"),
            qk_norm="head",
            gated=False,
            **different,
        )


FAMILY = Apertus()
