"""Granite 3 with experts: Granite's multipliers, one tensor for all experts of a layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, Experts, ExpertTensors, chosen
from .family import integer
from .granite import Granite

TENSORS = ExpertTensors(
    block="block_sparse_moe",
    router="router.layer",
    together=("input_linear.weight", "output_linear.weight"),
    apart=False,
    linear_router=True,
)


class GraniteMoe(Granite):
    name = "granitemoe"
    title = "Granite MoE"
    defaults: ClassVar[Mapping[str, Any]] = {**Granite.defaults, "num_experts_per_tok": 2}

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        size = integer(config, "intermediate_size")
        experts = Experts(*chosen(config, 8), size=size, scores="chosen", tensors=TENSORS)
        return super().describe(config, experts=experts, **different)


FAMILY = GraniteMoe()
