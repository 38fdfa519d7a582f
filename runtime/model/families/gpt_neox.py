"""GPT-NeoX, Pythia, RedPajama-INCITE and the first StableLM: one tensor for each head's query, key and value.

By default both blocks of a layer read its input, each through its own norm.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ..rope import Rope
from .decoder_family import DecoderArchitecture, DecoderFamily, Names, Norm, Places, flag, number

ROTARY = {"rotary_emb_base": "rope_theta", "rotary_pct": "partial_rotary_factor"}
"""This family's own keys for the rotation, and the keys of other families."""


class GptNeoX(DecoderFamily):
    name = "gpt_neox"
    title = "GPT-NeoX"
    prefixes = ("gpt_neox.",)
    names = Names(
        embedding="embed_in",
        norm="final_layer_norm",
        head="embed_out",
        attention="attention",
        qkv="query_key_value",
        out="dense",
        plain=("dense_h_to_4h", "dense_4h_to_h"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 50_432,
        "hidden_size": 6144,
        "intermediate_size": 24_576,
        "num_hidden_layers": 44,
        "num_attention_heads": 64,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
    }
    share = 0.25
    biased = (("attention_bias", ("q", "o")), ("", ("mlp",)))

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        return super().describe(
            {**config, "num_key_value_heads": None, "head_dim": None},  # transformers reads no others
            norm=Norm(number(config, "layer_norm_eps", 1e-5), centered=True, bias=True, wide=True),
            places=Places(parallel=flag(config, "use_parallel_residual")),
            fused=("groups",),
            gated=False,
            **different,
        )

    def ropes(self, config: Mapping[str, Any], kinds: Any, head_dim: int) -> Mapping[str, Rope]:
        """Read the family's own keys, which count only where `rope_parameters` lacks their values."""
        section = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
        rope = config.get(section) or {}
        rotary = {key: config[old] for old, key in ROTARY.items() if config.get(old) is not None}
        left = {key: value for key, value in config.items() if key not in ROTARY.values()}
        merged = {**rotary, **rope} if isinstance(rope, Mapping) else rope
        return super().ropes({**left, section: merged}, kinds, head_dim)


FAMILY = GptNeoX()
