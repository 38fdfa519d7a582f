"""MiniMax M2: experts chosen by sigmoids, norms over a token's queries and keys, a partial rotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Experts, chosen
from .family import UnsupportedCheckpoint, built_in, integer, section
from .mixtral import TENSORS

ROTATED = "rotary_dim"


class MinimaxM2(DecoderFamily):
    name = "minimax_m2"
    title = "MiniMax M2"
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 200_064,
        "hidden_size": 3072,
        "intermediate_size": 1536,
        "num_hidden_layers": 62,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 196_608,
        "rope_theta": 5_000_000.0,
        "num_experts_per_tok": 8,
    }
    share = 1.0
    further = "num_mtp_modules"
    biased = ()

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        for key, value in (
            *(("scoring_func", "sigmoid"), ("use_routing_bias", True), ("use_qk_norm", True)),
            *(("qk_norm_type", "per_layer"), ("shared_intermediate_size", 0), ("sliding_window", 0)),
        ):
            built_in(config, key, value, self.title)
        kinds = config.get("attn_type_list") or ()
        if not isinstance(kinds, list | tuple) or any(kind != 1 for kind in kinds):
            raise UnsupportedCheckpoint(
                "config.json: attn_type_list has layers without softmax attention", "attn_type_list"
            )
        experts = Experts(
            *chosen(config, 256),
            size=integer(config, "intermediate_size"),
            scores="sigmoid",
            normalized=True,
            correction=True,
            tensors=replace(TENSORS, correction="e_score_correction_bias"),
        )
        return super().describe(rotating(config), qk_norm="row", experts=experts, **different)

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        """Give the rotating part as a share too, which transformers reads."""
        rope = next(iter(dict(self.architecture(config).ropes).values()))
        return {"partial_rotary_factor": rope.share, ROTATED: round(rope.share * small["head_dim"])}


def rotating(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config with the share of a head that rotates: published files give the number of features,
    `rotary_dim`, which transformers does not read."""
    share = section(config, "rope_parameters").get("partial_rotary_factor")
    if config.get(ROTATED) is None or share is not None or config.get("partial_rotary_factor") is not None:
        return config
    return {**config, "partial_rotary_factor": integer(config, ROTATED) / integer(config, "head_dim")}


FAMILY = MinimaxM2()
