"""Jamba: Mamba 1 mixers, attention without rotation in some layers, and experts in some."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .decoder_family import (
    DecoderArchitecture,
    DecoderFamily,
    Experts,
    ExpertTensors,
    Mamba,
    Names,
    Places,
    chosen,
    flag,
)
from .family import FULL, LINEAR, UnsupportedCheckpoint, built_in, count, integer

TENSORS = ExpertTensors(block="feed_forward", router="router", linear_router=True)
PERIODS = ("attn_layer", "expert_layer")
"""The keys `..._period` and `..._offset` say which layers have attention, and which have experts."""
RANK = "mamba_dt_rank"


class Jamba(DecoderFamily):
    name = "jamba"
    title = "Jamba"
    names = Names(norm="final_layernorm", mlp="feed_forward")
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 65_536,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 262_144,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        RANK: "auto",
        "mamba_conv_bias": True,
    }
    biased = ()

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "hidden_act", "silu", self.title)
        built_in(config, "mamba_inner_layernorms", True, self.title)
        types = self.layer_types(config)
        mixture = experts(config)
        return super().describe(
            config,
            places=Places(before_mlp="pre_ff_layernorm"),
            layer_types=types,
            turns=(False,) * len(types),
            mamba=mamba(config),
            experts=mixture,
            routed=every(config, PERIODS[1]) if mixture is not None else (),
            **different,
        )

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return tuple(FULL if attends else LINEAR for attends in every(config, PERIODS[0]))

    def kinds(self, config: Mapping[str, Any], layers: Sequence[int]) -> Mapping[str, Any]:
        values = {**self.defaults, **config}
        out: dict[str, Any] = {}
        for keys in PERIODS:
            named = every(values, keys)
            out |= _period([named[i] for i in layers], keys)
        return out


FAMILY = Jamba()


def every(config: Mapping[str, Any], keys: str) -> tuple[bool, ...]:
    """Return which layers are those of a period, by one of PERIODS.

    Raises:
        UnsupportedCheckpoint: unless the offset is below the period.
    """
    layers, period = integer(config, "num_hidden_layers"), integer(config, f"{keys}_period")
    offset = count(config, f"{keys}_offset")
    if offset >= period:
        raise UnsupportedCheckpoint(
            f"config.json: {keys}_offset is {offset}, not below {keys}_period, {period}", f"{keys}_offset"
        )
    return tuple(i % period == offset for i in range(layers))


def _period(named: Sequence[bool], keys: str) -> dict[str, int]:
    """Return the keys that name these layers. If no period does, raise UnsupportedCheckpoint."""
    places = [i for i, is_named in enumerate(named) if is_named]
    offset = places[0] if places else len(named)
    period = places[1] - offset if len(places) > 1 else len(named) + 1
    if [i % period == offset for i in range(len(named))] != list(named):
        raise UnsupportedCheckpoint(f"config.json: no {keys}_period names layers {places}", f"{keys}_period")
    return {f"{keys}_period": period, f"{keys}_offset": offset}


def mamba(config: Mapping[str, Any]) -> Mamba:
    """Return the sizes of the mixers."""
    hidden = integer(config, "hidden_size")
    biases = {"in": "mamba_proj_bias", "conv": "mamba_conv_bias", "out": "mamba_proj_bias"}
    return Mamba(
        integer(config, "mamba_expand") * hidden,
        1,
        1,
        integer(config, "mamba_d_state"),
        integer(config, "mamba_d_conv"),
        biases=tuple(part for part, key in biases.items() if flag(config, key)),
        rank=math.ceil(hidden / 16) if config[RANK] == "auto" else integer(config, RANK),
    )


def experts(config: Mapping[str, Any]) -> Experts | None:
    """Return the experts; None for a single one, which is a plain feed-forward block."""
    if 1 in (config.get("num_experts"), config.get("num_local_experts")):
        return None
    total, per_token = chosen(config, 16)
    return Experts(total, per_token, integer(config, "intermediate_size"), tensors=TENSORS)
