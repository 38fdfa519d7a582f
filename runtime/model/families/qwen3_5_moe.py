"""Qwen 3.5 with experts in every layer, plus one expert that every token goes through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from .decoder_family import MULTIMODAL, DecoderArchitecture, ExpertTensors
from .gated_delta import SECTIONS, SIZES, WITH_EXPERTS, GatedDeltaFamily, experts
from .multimodal_rope import by_axes


class Qwen3_5Moe(GatedDeltaFamily):
    name = "qwen3_5_moe"
    title = "Qwen 3.5 MoE"
    model_types = ("qwen3_5_moe", "qwen3_5_moe_text")
    prefixes = MULTIMODAL
    defaults: ClassVar[Mapping[str, Any]] = {
        **SIZES,
        **WITH_EXPERTS,
        "vocab_size": 248_320,
        "num_hidden_layers": 40,
        "num_experts_per_tok": 8,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        """Describe experts with normalized scores; no layer is dense, so no dense size is read."""
        of_layer = replace(experts(config, 256), normalized=True, tensors=ExpertTensors(apart=False))
        sizes = {**config, "intermediate_size": of_layer.size}
        return by_axes(super().describe(sizes, experts=of_layer, **different), config, SECTIONS)


FAMILY = Qwen3_5Moe()
