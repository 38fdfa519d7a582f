"""Falcon-H1: attention and a Mamba 2 mixer side by side in each layer, and a multiplier for every part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Mamba, Names, Places, Scales, flag
from .family import CHATML, HYBRID, UnsupportedCheckpoint, built_in, integer, number
from .ssm import mixer


class FalconH1(DecoderFamily):
    name = "falcon_h1"
    title = "Falcon-H1"
    names = Names(norm="final_layernorm", mlp="feed_forward")
    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 128_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mamba_d_ssm": 1024,
        "mamba_n_heads": 128,
        "mamba_n_groups": 1,
        "mamba_d_state": 256,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_conv_bias": True,
        "mamba_norm_before_gate": True,
    }

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "hidden_act", "silu", self.title)
        gate, output = multipliers(config, "mlp_multipliers", 2)
        scales = Scales(
            multiplier(config, "attention_in_multiplier"),
            multiplier(config, "attention_out_multiplier"),
            multiplier(config, "ssm_out_multiplier"),
            gate,
            output,
        )
        described = super().describe(
            config,
            places=Places(before_mlp="pre_ff_layernorm"),
            mamba=mamba(config),
            embedding_scale=multiplier(config, "embedding_multiplier"),
            logit_scale=multiplier(config, "lm_head_multiplier"),
            scales=scales,
            **different,
        )
        # Keys are multiplied, and so are all scores.
        scale = described.attention_scale * multiplier(config, "key_multiplier")
        return replace(described, attention_scale=scale)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        return (HYBRID,) * integer(config, "num_hidden_layers")


def mamba(config: Mapping[str, Any]) -> Mamba:
    """Return the sizes of the mixers."""
    values = {key: value for key, value in config.items() if value is not None}
    expanded = integer(config, "mamba_expand") * integer(config, "hidden_size")
    return mixer(
        config,
        integer(values, "mamba_d_ssm", expanded),
        "mamba_d_ssm",
        {"in": "mamba_proj_bias", "conv": "mamba_conv_bias", "out": "projectors_bias"},
        norm_parts=integer(config, "mamba_n_groups") if flag(config, "mamba_rms_norm") else 0,
        gate_last=flag(config, "mamba_norm_before_gate"),
        input_scale=multiplier(config, "ssm_in_multiplier"),
        scales=multipliers(config, "ssm_multipliers", 5),
        closed=True,
    )


def multiplier(config: Mapping[str, Any], key: str) -> float:
    return number(config, key, 1.0)


def multipliers(config: Mapping[str, Any], key: str, count: int) -> tuple[Any, ...]:
    """Read a list of multipliers; without it all are 1."""
    factors = config.get(key)
    if factors is None:
        return (1.0,) * count
    if not isinstance(factors, list | tuple) or len(factors) != count:
        raise UnsupportedCheckpoint(f"config.json: {key} does not hold {count} multipliers", key)
    return tuple(number({key: value}, key, 1.0) for value in factors)


FAMILY = FalconH1()
