"""Arcee's Trinity: gated attention, of which only window layers rotate, and experts with shared experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import (
    DecoderArchitecture,
    DecoderFamily,
    Experts,
    ExpertTensors,
    Norm,
    Places,
    chosen,
    flag,
)
from .family import SLIDING, built_in, count, integer, number

PLACES = Places(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_mlp_layernorm",
    after_mlp="post_mlp_layernorm",
)
TENSORS = ExpertTensors(
    router="router.gate", correction="expert_bias", shared="shared_experts", linear_router=True
)


class Afmoe(DecoderFamily):
    name = "afmoe"
    title = "Trinity"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 200_192,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 32,
        "num_dense_layers": 1,
        "num_attention_heads": 16,
        "head_dim": 128,
        "max_position_embeddings": 16_384,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "global_attn_every_n_layers": 4,
        "sliding_window": 1024,
    }
    full_every = "global_attn_every_n_layers"
    biased = (("attention_bias", ("q", "k", "v", "o")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        for key, value in (("score_func", "sigmoid"), ("route_norm", True), ("n_group", 1)):
            built_in(config, key, value, self.title)
        size, hidden = integer(config, "moe_intermediate_size"), integer(config, "hidden_size")
        experts = Experts(
            *chosen(config, 64),
            size=size,
            scores="sigmoid",
            normalized=True,
            scale=number(config, "route_scale", 1.0),
            correction=True,
            shared=size * integer(config, "num_shared_experts"),
            tensors=TENSORS,
        )
        dense = count(config, "num_dense_layers")
        kinds = self.layer_types(config)
        return super().describe(
            config,
            norm=Norm(number(config, "rms_norm_eps", 1e-5), wide=True),
            places=PLACES,
            turns=tuple(kind == SLIDING for kind in kinds),
            qk_norm="head",
            output_gate=True,
            gate_apart=True,
            embedding_scale=hidden**0.5 if flag(config, "mup_enabled") else 1.0,
            experts=experts,
            routed=tuple(i >= dense for i in range(len(kinds))),
            **different,
        )


FAMILY = Afmoe()
