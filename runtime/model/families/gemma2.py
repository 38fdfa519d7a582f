"""Gemma 2: local and global layers alternate; attention scores and logits are soft-capped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture
from .family import FULL, SLIDING, built_in, integer, listed_types
from .gemma import Gemma


class Gemma2(Gemma):
    name = "gemma2"
    title = "Gemma 2"
    eager = True
    caps_in_float32 = False
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256_000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    }

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        layers = integer(config, "num_hidden_layers")
        default = [FULL if i % 2 else SLIDING for i in range(layers)]
        return listed_types(config.get("layer_types") or default, layers)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "use_bidirectional_attention", False, self.title)
        return super().describe(config, **different)


FAMILY = Gemma2()
