"""Phi 1, 1.5 and 2: attention and a plain feed-forward block in parallel, with biases everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Names, Norm, Places, number
from .family import built_in


class Phi(DecoderFamily):
    name = "phi"
    title = "Phi 1 and 2"
    names = Names(norm="final_layernorm", out="dense", plain=("fc1", "fc2"))
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 51_200,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu_new",
    }
    share = 0.5
    biased = (("", ("q", "k", "v", "o", "mlp", "head")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "qk_layernorm", False, self.title)
        return super().describe(
            config,
            norm=Norm(number(config, "layer_norm_eps", 1e-5), centered=True, bias=True, wide=True),
            places=Places(before_mlp=None, parallel=True),
            gated=False,
            **different,
        )


FAMILY = Phi()
