"""LFM2: attention with norms of queries and keys in some layers, gated short convolutions in the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from .decoder_family import (
    Conv,
    DecoderArchitecture,
    DecoderFamily,
    Names,
    Norm,
    Places,
    flag,
    listed_types,
)
from .family import CHATML, FULL, LINEAR, MOST, UnsupportedCheckpoint, built_in, integer, number

KINDS = {"conv": LINEAR, FULL: FULL}
"""The kinds of layers by their names in config.json."""
ATTENTION = "full_attn_idxs"
"""The key that lists the layers with attention where `layer_types` does not name the kinds."""

FACTOR = "block_ffn_dim_multiplier"


class Lfm2(DecoderFamily):
    name = "lfm2"
    title = "LFM2"
    names = Names(
        norm="embedding_norm",
        mlp="feed_forward",
        out="out_proj",
        qk_norms=("q_layernorm", "k_layernorm"),
        gated=("w1", "w3", "w2"),
    )
    turn_markers = CHATML
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 65_536,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128_000,
        "rope_theta": 1_000_000.0,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        FACTOR: 1.0,
        "block_auto_adjust_ff_dim": True,
        "tie_word_embeddings": True,
    }
    biased = ()

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "hidden_act", "silu", self.title)
        tied = config.get("tie_embedding", config["tie_word_embeddings"])
        return super().describe(
            {**config, "tie_word_embeddings": tied, "intermediate_size": self.width(config)},
            norm=Norm(number(config, "norm_eps", 1e-5)),
            places=Places("operator_norm", None, "ffn_norm"),
            qk_norm="head",
            conv=Conv(integer(config, "conv_L_cache"), flag(config, "conv_bias")),
            **different,
        )

    def width(self, config: Mapping[str, Any]) -> int:
        """Return the features within a feed-forward block: two thirds of the config's, rounded up."""
        key = "block_ff_dim" if "block_ff_dim" in config else "intermediate_size"
        width = integer(config, key)
        if not flag(config, "block_auto_adjust_ff_dim"):
            return width
        width = int(2 * width / 3)
        if config[FACTOR] is None:
            return width
        width = int(min(number(config, FACTOR, 1.0) * width, MOST + 1))  # above MOST, it is refused
        step = integer(config, "block_multiple_of")
        return step * -(-width // step)

    def layer_types(self, config: Mapping[str, Any]) -> tuple[str, ...]:
        layers = integer(config, "num_hidden_layers")
        if config.get("layer_types") is not None:
            return tuple(KINDS[kind] for kind in listed_types(config["layer_types"], layers, tuple(KINDS)))
        full = config.get(ATTENTION)
        full = range(layers) if full is None else full
        if not isinstance(full, range | list | tuple) or not all(i in range(layers) for i in full):
            raise UnsupportedCheckpoint(
                f"config.json: {ATTENTION} is {full!r}, not some of {layers} layers", ATTENTION
            )
        return tuple(FULL if i in full else LINEAR for i in range(layers))

    def kinds(self, config: Mapping[str, Any], layers: Sequence[int]) -> Mapping[str, Any]:
        types = [self.architecture(config).layer_types[i] for i in layers]
        return {
            "layer_types": ["conv" if kind == LINEAR else kind for kind in types],
            ATTENTION: [i for i, kind in enumerate(types) if kind == FULL],
        }

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        widths = dict.fromkeys(("block_dim", "conv_dim", "conv_dim_out"), small["hidden_size"])
        out = {key: value for key, value in widths.items() if key in small}
        if "block_ff_dim" in small:
            out["block_ff_dim"] = small["intermediate_size"]
        return {**out, "block_auto_adjust_ff_dim": False}


FAMILY = Lfm2()
