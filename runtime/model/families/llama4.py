"""Llama 4's text model: chunked attention in layers that rotate, experts plus one shared expert."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from .decoder_family import (
    DecoderArchitecture,
    DecoderFamily,
    Experts,
    ExpertTensors,
    Growth,
    chosen,
    flag,
    listed_types,
    turning,
)
from .family import CHUNKED, FULL, LLAMA4, UnsupportedCheckpoint, integer, number

TENSORS = ExpertTensors("feed_forward", "router", apart=False, inputs_first=True, swapped=True)
TUNED = "attn_temperature_tuning"


class Llama4(DecoderFamily):
    name = "llama4"
    title = "Llama 4"
    model_types = ("llama4", "llama4_text")
    prefixes = ("language_model.model.", "model.")
    loaded_as: Mapping[str, str] = MappingProxyType({})
    turn_markers = LLAMA4
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 202_048,
        "hidden_size": 5120,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 1,
        "use_qk_norm": True,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        TUNED: True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }
    interleaved = True

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        size = integer(config, "intermediate_size")
        experts = Experts(
            *chosen(config, 16), size=size, scores="sigmoid", on_inputs=True, shared=size, tensors=TENSORS
        )
        return super().describe(
            {**config, "intermediate_size": integer(config, "intermediate_size_mlp")},
            turns=_turning(config),
            normed_turns=flag(config, "use_qk_norm"),
            query_growth=_growth(config),
            experts=experts,
            routed=_routed(config),
            **different,
        )

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        """Set the yes or no of the temperature tuning: transformers 5 does not accept a number for it."""
        return {TUNED: self.architecture(config).query_growth is not None}

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        """Read `layer_types`; by default, layers that rotate are chunked."""
        layers = integer(config, "num_hidden_layers")
        if config.get("layer_types") is not None:
            return listed_types(config["layer_types"], layers, (FULL, CHUNKED))
        return tuple(CHUNKED if turns else FULL for turns in _turning(config))


def _turning(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers rotate; published checkpoints' empty list means transformers' default."""
    return turning({**config, "no_rope_layers": config.get("no_rope_layers") or None})


def _growth(config: Mapping[str, Any]) -> Growth | None:
    tuned = config.get(TUNED)
    # Older config.json files have a number for yes.
    if not flag({TUNED: bool(tuned) if isinstance(tuned, int) else tuned}, TUNED):
        return None
    beta = number(config, "attn_scale", 0.1)
    return Growth(beta, integer(config, "floor_scale"), shift=1, unturned=True)


def _routed(config: Mapping[str, Any]) -> tuple[bool, ...]:
    """Return which layers have experts: those of `moe_layers`, or every `interleave_moe_layer_step`-th."""
    layers, listed = integer(config, "num_hidden_layers"), config.get("moe_layers")
    if listed is None:
        step = integer(config, "interleave_moe_layer_step")
        return tuple((i + 1) % step == 0 for i in range(layers))
    known = isinstance(listed, list | tuple) and all(isinstance(i, int) and 0 <= i < layers for i in listed)
    if not known:
        raise UnsupportedCheckpoint(
            f"config.json: moe_layers is {listed!r}, not some of {layers} layers", "moe_layers"
        )
    return tuple(i in listed for i in range(layers))


FAMILY = Llama4()
