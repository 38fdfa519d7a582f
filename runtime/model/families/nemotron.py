"""Nemotron 3 and 4, and Minitron: layer norms whose weights hold the difference from 1, squared ReLUs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Names, Norm, number


class Nemotron(DecoderFamily):
    name = "nemotron"
    title = "Nemotron 3 and 4"
    names = Names(plain=("up_proj", "down_proj"))
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256_000,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "max_position_embeddings": 4096,
        "hidden_act": "relu2",
    }
    share = 0.5

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        eps = number(config, "norm_eps", 1e-5)
        norm = Norm(eps, centered=True, bias=True, offset=1.0, wide=True)
        return super().describe(config, norm=norm, gated=False, **different)


FAMILY = Nemotron()
