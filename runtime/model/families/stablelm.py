"""StableLM 3B, 2 1.6B and 2 12B: Llama's layers with layer norms and heads that rotate in part.

The 12B has a layer norm for each head's queries and keys, and runs its blocks in parallel.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Norm, Places, flag, number


class StableLm(DecoderFamily):
    name = "stablelm"
    title = "StableLM"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50_304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "max_position_embeddings": 4096,
    }
    share = 0.25
    biased = (("use_qkv_bias", ("q", "k", "v")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        parallel = flag(config, "use_parallel_residual")
        return super().describe(
            {**config, "head_dim": None},  # transformers reads no other
            norm=Norm(number(config, "layer_norm_eps", 1e-5), centered=True, bias=True, wide=True),
            places=Places(before_mlp=None, parallel=True) if parallel else Places(),
            qk_norm="each" if flag(config, "qk_layernorm") else "",
            **different,
        )


FAMILY = StableLm()
