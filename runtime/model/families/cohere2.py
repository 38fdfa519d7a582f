"""Command R7B and Command A: attention and feed-forward block run in parallel, only window layers rotate.

logit_scale applies in a multimodal checkpoint too, as vLLM computes it; transformers 5.12 omits it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderArchitecture, DecoderFamily, Norm, Places, number
from .family import SLIDING


class Cohere2(DecoderFamily):
    name = "cohere2"
    title = "Command R7B and A"
    wrappers = ("cohere2_vision",)
    prefixes = MULTIMODAL
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "max_position_embeddings": 8192,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
        "tie_word_embeddings": True,
    }
    full_every = "sliding_window_pattern"
    interleaved = True

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(
            {**config, "head_dim": None},  # transformers reads no other
            norm=Norm(number(config, "layer_norm_eps", 1e-5), centered=True, wide=True),
            places=Places(before_mlp=None, parallel=True),
            turns=tuple(kind == SLIDING for kind in self.layer_types(config)),
            logit_scale=number(config, "logit_scale", 0.0625),
            **different,
        )


FAMILY = Cohere2()
