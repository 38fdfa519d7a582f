"""The common parts of Qwen's families of gated delta nets: every fourth layer is gated attention, the others
are gated delta nets. All norms except the nets' own hold the difference from 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import (
    DecoderArchitecture,
    DecoderFamily,
    Delta,
    Experts,
    Norm,
    chosen,
    flag,
    listed_types,
)
from .family import CHATML, FULL, LINEAR, UnsupportedCheckpoint, built_in, integer, number

SIZES: Mapping[str, Any] = {
    "num_attention_heads": 16,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
"""Defaults that all of these families share."""
WITH_EXPERTS: Mapping[str, Any] = {
    "hidden_size": 2048,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
}
"""Defaults of the families with experts."""

SECTIONS = (11, 11, 10)
"""The pairs of features that turn by time, row and column in Qwen 3.5, if config.json does not say so."""


class GatedDeltaFamily(DecoderFamily):
    """A family with layers of gated delta nets and of gated attention."""

    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = SIZES
    share = 0.25

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "hidden_act", "silu", self.title)
        return super().describe(
            config,
            norm=Norm(number(config, "rms_norm_eps", 1e-6), offset=1.0, wide=True),
            qk_norm="head",
            output_gate=True,
            delta=delta(config),
            **different,
        )

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        layers = integer(config, "num_hidden_layers")
        if config.get("layer_types") is not None:
            return listed_types(config["layer_types"], layers, (FULL, LINEAR))
        interval = integer(config, "full_attention_interval")
        return tuple(FULL if (i + 1) % interval == 0 else LINEAR for i in range(layers))


def delta(config: Mapping[str, Any]) -> Delta:
    """Return the sizes of the gated delta nets."""
    keys, values = integer(config, "linear_num_key_heads"), integer(config, "linear_num_value_heads")
    if values % keys:
        raise UnsupportedCheckpoint(
            f"config.json: linear_num_key_heads is {keys}, which does not divide {values} value heads",
            "linear_num_key_heads",
        )
    return Delta(
        keys,
        values,
        integer(config, "linear_key_head_dim"),
        integer(config, "linear_value_head_dim"),
        integer(config, "linear_conv_kernel_dim"),
    )


def experts(config: Mapping[str, Any], count: int) -> Experts:
    """Return the experts, including a shared expert with its own gate.

    Args:
        count: experts of a layer, by default.
    """
    return Experts(
        *chosen(config, count),
        size=integer(config, "moe_intermediate_size"),
        normalized=flag(config, "norm_topk_prob"),
        shared=integer(config, "shared_expert_intermediate_size"),
        shared_gate=True,
    )
