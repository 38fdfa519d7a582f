"""Qwen 3 with experts: all feed-forward blocks, or most of them, are experts. The language model of Qwen 3 VL
with experts is one whose heads turn by time, row and column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from .decoder_family import (
    EXPERT_KEYS,
    MULTIMODAL,
    DecoderArchitecture,
    DecoderFamily,
    Experts,
    ExpertTensors,
    chosen,
    flag,
    routed_every,
)
from .family import CHATML, FULL, SLIDING, integer, text_config
from .multimodal_rope import by_axes

VL = ("qwen3_vl_moe", "qwen3_vl_moe_text")
VL_DEFAULTS = {
    **{"intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16},
    **{"max_position_embeddings": 128_000, "rope_theta": 500_000.0},
    **{"num_experts_per_tok": 4, "moe_intermediate_size": 1408},
}
VL_EXPERTS = {"num_experts": 60}
"""Defaults of Qwen 3 VL with experts, where they differ."""


class Qwen3Moe(DecoderFamily):
    name = "qwen3_moe"
    title = "Qwen 3 MoE"
    model_types = (*VL, "qwen3_moe")
    prefixes = MULTIMODAL
    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 32_768,
        "sliding_window": 4096,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 768,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    }

    def architecture(self, config: Mapping[str, Any]) -> DecoderArchitecture:
        text = text_config(config)
        if text.get("model_type") not in VL and config.get("model_type") not in VL:
            return super().architecture(config)
        count = {} if any(key in text for key in EXPERT_KEYS) else VL_EXPERTS
        text = {**VL_DEFAULTS, **count, **text, "use_sliding_window": False, "norm_topk_prob": True}
        whole = text if text_config(config) is config else {**config, "text_config": text}
        a = by_axes(super().architecture(whole), text, (24, 20, 20))
        assert a.experts is not None
        return replace(a, experts=replace(a.experts, tensors=ExpertTensors(apart=False, inputs_first=True)))

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make no expert's matrix square: transformers tells by its shape how a vision model stores it."""
        return {"moe_intermediate_size": 2 * small["hidden_size"]} if config.get("model_type") in VL else {}

    def architecture_of(
        self, config: Mapping[str, Any], tensors: Mapping[str, Sequence[int]]
    ) -> DecoderArchitecture:
        """Read as other families do. Qwen 3 VL's experts are [E, in, out] on the hub; transformers 5 saves
        [E, out, in], and tells both apart by their shapes too."""
        a = super().architecture_of(config, tensors)
        if a.experts is None or not a.experts.tensors.inputs_first:
            return a
        names, (e, d, f) = a.experts.tensors, (a.experts.count, a.hidden_size, a.experts.size)
        saved = dict(zip(names.together, ((e, 2 * f, d), (e, d, f)), strict=True))
        shapes = {name: tuple(shape) for name, shape in tensors.items() if name.endswith(names.together)}
        if not shapes or any(
            shape != saved[name[name.index("experts.") :]] for name, shape in shapes.items()
        ):
            return a
        return replace(a, experts=replace(a.experts, tensors=replace(names, inputs_first=False)))

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        experts = Experts(
            *chosen(config, 128),
            size=integer(config, "moe_intermediate_size"),
            normalized=flag(config, "norm_topk_prob"),
        )
        routed = routed_every(config)
        return super().describe(config, qk_norm="head", experts=experts, routed=routed, **different)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Put an enabled window in all layers, as transformers does, which ignores `max_window_layers`."""
        used = flag(config, "use_sliding_window") and config.get("sliding_window") is not None
        return (SLIDING if used else FULL,) * integer(config, "num_hidden_layers")


FAMILY = Qwen3Moe()
