"""GLM 4.5 and 4.6: dense layers first, then experts chosen by sigmoids, plus one that all tokens go through.

Checkpoints hold an additional layer, which predicts one more token; it is not changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Experts, ExpertTensors, chosen, flag
from .family import UnsupportedCheckpoint, count, integer, number

TENSORS = ExpertTensors(shared="shared_experts")


class Glm4Moe(DecoderFamily):
    name = "glm4_moe"
    title = "GLM 4.5 and 4.6"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 151_552,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,  # as published; 4096 / 96, which transformers takes, is no number of pairs
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
    }
    share = 0.5
    further = "num_nextn_predict_layers"
    biased = (("attention_bias", ("q", "k", "v")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        size = integer(config, "moe_intermediate_size")
        experts, per_token = chosen(config, 128)
        groups, chosen_groups = grouped(config, experts, per_token)
        dense = count(config, "first_k_dense_replace")
        return super().describe(
            config,
            qk_norm="head" if flag(config, "use_qk_norm") else "",
            experts=Experts(
                experts,
                per_token,
                size,
                scores="sigmoid",
                normalized=flag(config, "norm_topk_prob"),
                scale=number(config, "routed_scaling_factor", 1.0),
                groups=groups,
                chosen_groups=chosen_groups,
                correction=True,
                wide=True,
                shared=size * integer(config, "n_shared_experts"),
                tensors=TENSORS,
            ),
            routed=tuple(i >= dense for i in range(integer(config, "num_hidden_layers"))),
            **different,
        )


def grouped(config: Mapping[str, Any], experts: int, per_token: int) -> tuple[int, int]:
    """Return the number of expert groups of a layer, and how many groups a token's experts are chosen from.

    Args:
        experts, per_token: experts of a layer, and how many of them a token goes through.

    Raises:
        UnsupportedCheckpoint: when the groups do not divide the experts, or too few are chosen.
    """
    groups, chosen_groups = integer(config, "n_group"), integer(config, "topk_group")
    if experts % groups:
        raise UnsupportedCheckpoint(
            f"config.json: n_group is {groups}, which does not divide {experts} experts", "n_group"
        )
    if chosen_groups > groups:
        raise UnsupportedCheckpoint(
            f"config.json: topk_group is {chosen_groups}, of {groups} groups", "topk_group"
        )
    among = chosen_groups * experts // groups
    if per_token > among:
        raise UnsupportedCheckpoint(
            f"config.json: num_experts_per_tok is {per_token}, and {chosen_groups} of {groups} groups have "
            f"{among} experts",
            "num_experts_per_tok",
        )
    return groups, chosen_groups


FAMILY = Glm4Moe()
