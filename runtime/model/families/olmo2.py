"""OLMo 2: norms after each block, and norms over all queries and all keys of a token at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import AFTER, DecoderArchitecture, DecoderFamily, Norm, number


class Olmo2(DecoderFamily):
    name = "olmo2"
    title = "OLMo 2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50_304,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "rms_norm_eps": 1e-5,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        norm = Norm(number(config, "rms_norm_eps", 1e-5), wide=True)
        return super().describe(config, norm=norm, places=AFTER, qk_norm="row", **different)


FAMILY = Olmo2()
