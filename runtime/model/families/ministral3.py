"""Ministral 3 and the later Mistral Small: YaRN, and queries that grow with their position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderArchitecture, DecoderFamily, Growth, integer
from .family import number, section

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""The default of transformers' Ministral3Config without `rope_parameters`."""


class Ministral3(DecoderFamily):
    name = "ministral3"
    title = "Ministral 3"
    wrappers = ("mistral3",)
    prefixes = MULTIMODAL
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 131_072,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 34,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        rope, growth = growing(config, YARN)
        return super().describe({**config, "rope_parameters": rope}, query_growth=growth, **different)


def growing(config: Mapping[str, Any], default: Mapping[str, Any]) -> tuple[Mapping[str, Any], Growth | None]:
    """Return config.json's rotation, or the default one, and how queries grow with their position by it."""
    rope = section(config, "rope_scaling") or section(config, "rope_parameters") or default
    if not rope.get("llama_4_scaling_beta"):
        return rope, None
    beta = number(rope, "llama_4_scaling_beta", 0.1)
    return rope, Growth(beta, integer(rope, "original_max_position_embeddings"))


FAMILY = Ministral3()
