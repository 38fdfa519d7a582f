"""ERNIE 4.5 with experts: dense layers first, a bias for the choice of experts, and shared experts.

Checkpoints hold an additional layer, which predicts one more token; it is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Experts, ExpertTensors
from .family import UnsupportedCheckpoint, built_in, count, integer

TENSORS = ExpertTensors(shared="shared_experts", correction="moe_statics.e_score_correction_bias", boxed=True)


class Ernie45Moe(DecoderFamily):
    name = "ernie4_5_moe"
    title = "ERNIE 4.5 MoE"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
        "moe_layer_interval": 1,
    }
    interleaved = True
    further = "num_nextn_predict_layers"
    biased = ()

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "use_bias", False, self.title)
        built_in(config, "moe_norm_min", 1e-12, self.title)
        experts, per_token = integer(config, "moe_num_experts"), integer(config, "moe_k")
        if per_token > experts:
            raise UnsupportedCheckpoint(f"config.json: moe_k is {per_token}, of {experts} experts", "moe_k")
        size = integer(config, "moe_intermediate_size")
        return super().describe(
            config,
            experts=Experts(
                experts,
                per_token,
                size,
                normalized=True,
                correction=True,
                wide=True,
                shared=size * count(config, "moe_num_shared_experts"),
                tensors=TENSORS,
            ),
            routed=_routed(config),
            **different,
        )


def _routed(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have experts: every `moe_layer_interval`-th of those between two indices."""
    layers, interval = integer(config, "num_hidden_layers"), integer(config, "moe_layer_interval")
    first, last = count(config, "moe_layer_start_index"), config.get("moe_layer_end_index")
    last = layers - 1 if last in (None, -1) else count(config, "moe_layer_end_index")
    routed = tuple(first <= i <= last and (i + 1) % interval == 0 for i in range(layers))
    if not any(routed):
        raise UnsupportedCheckpoint(
            f"config.json: moe_layer_start_index is {first}, which leaves no layer with experts",
            "moe_layer_start_index",
        )
    return routed


FAMILY = Ernie45Moe()
