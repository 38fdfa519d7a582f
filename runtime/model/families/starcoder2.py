"""StarCoder2: layer norms, biases everywhere, and a feed-forward block without a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Norm, number


class Starcoder2(DecoderFamily):
    name = "starcoder2"
    title = "StarCoder2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 49_152,
        "hidden_size": 3072,
        "intermediate_size": 12_288,
        "num_hidden_layers": 30,
        "num_attention_heads": 24,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "hidden_act": "gelu_pytorch_tanh",
        "use_bias": True,
        "tie_word_embeddings": True,
    }
    biased = (("use_bias", ("q", "k", "v", "o", "mlp")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        norm = Norm(number(config, "norm_epsilon", 1e-5), centered=True, bias=True, wide=True)
        return super().describe(config, norm=norm, gated=False, **different)


FAMILY = Starcoder2()
