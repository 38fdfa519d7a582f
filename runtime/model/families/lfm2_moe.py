"""LFM2 with experts: those of a layer are chosen by corrected sigmoids; the first layers have none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, Experts, ExpertTensors, chosen, flag
from .family import count, integer, number
from .lfm2 import Lfm2

TENSORS = ExpertTensors(
    block="feed_forward",
    correction="expert_bias",
    expert=tuple(f"experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2")),
    linear_router=True,
)


class Lfm2Moe(Lfm2):
    name = "lfm2_moe"
    title = "LFM2 MoE"
    defaults: ClassVar[Mapping[str, Any]] = {
        **Lfm2.defaults,
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "num_experts_per_tok": 4,
        "num_dense_layers": 2,
        "use_expert_bias": True,
        "norm_topk_prob": True,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        experts = Experts(
            *chosen(config, 32),
            size=integer(config, "moe_intermediate_size"),
            scores="sigmoid",
            normalized=flag(config, "norm_topk_prob"),
            eps=1e-6,
            scale=number(config, "routed_scaling_factor", 1.0),
            correction=flag(config, "use_expert_bias"),
            tensors=TENSORS,
        )
        layers, dense = integer(config, "num_hidden_layers"), count(config, "num_dense_layers")
        routed = tuple(i >= dense for i in range(layers))
        return super().describe(config, experts=experts, routed=routed, **different)

    def width(self, config: Mapping[str, Any]) -> int:
        return integer(config, "intermediate_size")


FAMILY = Lfm2Moe()
