"""Falcon 7B, 40B, 180B and 2 11B: both blocks of a layer in parallel, and one tensor for a group of heads.

Checkpoints with ALiBi instead of rotation are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .decoder_family import DecoderArchitecture, DecoderFamily, Names, Norm, Places, flag, number
from .family import UnsupportedCheckpoint, built_in, integer


class Falcon(DecoderFamily):
    name = "falcon"
    title = "Falcon"
    prefixes = ("transformer.",)
    names = Names(
        layers="h",
        embedding="word_embeddings",
        norm="ln_f",
        attention="self_attention",
        qkv="query_key_value",
        out="dense",
        plain=("dense_h_to_4h", "dense_4h_to_h"),
    )
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 65_024,
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "max_position_embeddings": 2048,
        "activation": "gelu",
        "multi_query": True,
        "parallel_attn": True,
        "tie_word_embeddings": True,
    }
    biased = (("bias", ("q", "o", "mlp")),)

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        built_in(config, "alibi", False, self.title)
        hidden = integer(config, "hidden_size")
        changed = {
            "intermediate_size": config.get("ffn_hidden_size") or 4 * hidden,
            "num_key_value_heads": _kv_heads(config),
            "head_dim": None,
            "hidden_act": config.get("activation"),
        }
        return super().describe(
            {**config, **changed},
            norm=Norm(number(config, "layer_norm_epsilon", 1e-5), centered=True, bias=True, wide=True),
            places=_places(config),
            fused=("groups",),
            gated=False,
            **different,
        )

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        names = {"num_kv_heads": "num_key_value_heads", "ffn_hidden_size": "intermediate_size"}
        return {key: small[name] for key, name in names.items() if config.get(key) is not None}


def _kv_heads(config: Mapping[str, Any]) -> int:
    """Return the number of key heads: given for new layers; old layers have one, or one for each head."""
    heads = integer(config, "num_attention_heads")
    if flag(config, "new_decoder_architecture"):
        return heads if config.get("num_kv_heads") is None else integer(config, "num_kv_heads")
    return 1 if flag(config, "multi_query") else heads


def _places(config: Mapping[str, Any]) -> Places:
    """Return the norms: one for both parallel blocks, one for each, or those of blocks after each other."""
    new, parallel = flag(config, "new_decoder_architecture"), flag(config, "parallel_attn")
    norms = config.get("num_ln_in_parallel_attn")
    if norms is None:
        norms = 2 if new else 1
    if norms not in (1, 2) or (new and not parallel) or (norms == 2 and not new):
        raise UnsupportedCheckpoint(
            f"config.json: num_ln_in_parallel_attn is {norms!r}; parallel blocks have 1 norm, or 2 with "
            "new_decoder_architecture",
            "num_ln_in_parallel_attn",
        )
    if not parallel:
        return Places()
    return (
        Places("ln_attn", None, "ln_mlp", parallel=True)
        if norms == 2
        else Places(before_mlp=None, parallel=True)
    )


FAMILY = Falcon()
