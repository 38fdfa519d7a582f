"""Qwen 3 Next: gated delta nets, with two projection tensors by key head, and experts as in Qwen 3.5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, routed_every
from .gated_delta import SIZES, WITH_EXPERTS, GatedDeltaFamily, experts


class Qwen3Next(GatedDeltaFamily):
    name = "qwen3_next"
    title = "Qwen 3 Next"
    defaults: ClassVar[Mapping[str, Any]] = {
        **SIZES,
        **WITH_EXPERTS,
        "vocab_size": 151_936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 10,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(
            config,
            experts=experts(config, 512),
            routed=routed_every(config),
            fused=("delta",),
            **different,
        )


FAMILY = Qwen3Next()
