"""The common parts of DeepSeek's families and those built like them: latent attention, and after dense layers
experts, plus one that all tokens go through."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..rope import Rope
from .decoder_family import (
    DecoderArchitecture,
    DecoderFamily,
    Experts,
    ExpertTensors,
    Latent,
    chosen,
    flag,
)
from .family import UnsupportedCheckpoint, built_in, count, integer, number, section, text_config
from .glm4_moe import grouped
from .rotary import read_ropes

TENSORS = ExpertTensors(shared="shared_experts")


class LatentFamily(DecoderFamily):
    """A family whose layers have latent attention.

    Attributes:
        scaled: whether yarn's `mscale_all_dim` scales the scores.
        method: how experts are chosen, the only `topk_method` that is known.
        scores: how the router's logits become scores, the only `scoring_func` that is known.
    """

    further = "num_nextn_predict_layers"
    scaled = True
    method: str = "noaux_tc"
    scores: str = "sigmoid"

    def describe(self, config: Mapping[str, Any], **different: Any) -> DecoderArchitecture:
        latent = Latent(
            keys=integer(config, "kv_lora_rank"),
            queries=count(config, "q_lora_rank"),
            plain=integer(config, "qk_nope_head_dim"),
            turned=integer(config, "qk_rope_head_dim"),
            values=integer(config, "v_head_dim"),
        )
        width, heads = latent.plain + latent.turned, integer(config, "num_attention_heads")
        built_in(config, "num_key_value_heads", heads, f"{self.title} with {heads} heads")
        built_in(config, "attention_bias", False, self.title)
        built_in(config, "moe_layer_freq", 1, self.title)
        return super().describe(
            # Checkpoints give head_dim several meanings, of which transformers reads none.
            {**config, "head_dim": width, "num_key_value_heads": heads},
            latent=latent,
            attention_scale=width**-0.5 * (magnitude(config) ** 2 if self.scaled else 1.0),
            experts=self.experts(config),
            routed=self.routed(config),
            **different,
        )

    def ropes(self, config: Mapping[str, Any], kinds: Sequence[str], head_dim: int) -> Mapping[str, Rope]:
        turned, pairs = integer(config, "qk_rope_head_dim"), flag(config, "rope_interleave")
        return read_ropes(config, kinds, self.title, head_dim=turned, interleaved=pairs)

    def experts(self, config: Mapping[str, Any]) -> Experts:
        """Return the experts of a layer."""
        built_in(config, "topk_method", self.method, self.title)
        built_in(config, "scoring_func", self.scores, self.title)
        size = integer(config, "moe_intermediate_size")
        experts, per_token = chosen(config, 1)
        groups, chosen_groups = grouped(config, experts, per_token)
        return Experts(
            experts,
            per_token,
            size,
            scores=self.scores,
            normalized=flag(config, "norm_topk_prob"),
            scale=number(config, "routed_scaling_factor", 1.0),
            groups=groups,
            chosen_groups=chosen_groups,
            correction=self.scores == "sigmoid",
            wide=True,
            shared=size * integer(config, "n_shared_experts"),
            tensors=TENSORS,
        )

    def routed(self, config: Mapping[str, Any]) -> tuple[bool, ...]:
        """Return which layers have experts."""
        dense = count(config, "first_k_dense_replace")
        return tuple(i >= dense for i in range(integer(config, "num_hidden_layers")))

    def miniature(self, config: Mapping[str, Any], small: Mapping[str, Any]) -> Mapping[str, Any]:
        text, hidden, heads = text_config(config), small["hidden_size"], small["num_attention_heads"]
        width = small.get("head_dim") or hidden // heads
        plain, turned = (
            text.get(key, self.defaults[key]) for key in ("qk_nope_head_dim", "qk_rope_head_dim")
        )
        out = dict.fromkeys(("qk_rope_head_dim", "v_head_dim"), width)
        out["qk_nope_head_dim"] = width * max(1, plain // turned)
        out |= {"kv_lora_rank": hidden, "num_key_value_heads": heads}
        if text.get("q_lora_rank", self.defaults["q_lora_rank"]):
            out["q_lora_rank"] = hidden
        if (text.get("n_group") or 1) > 1:
            out |= {"n_group": 2, "topk_group": 1}  # of two experts or more
        return out


def magnitude(config: Mapping[str, Any]) -> float:
    """Return yarn's factor of a query and of a key, from `mscale_all_dim`; 1 without scaling."""
    key = "rope_scaling" if section(config, "rope_scaling") else "rope_parameters"
    scaling = section(config, key)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default" or scaling.get("mscale_all_dim") in (None, 0):
        return 1.0
    if kind != "yarn":
        raise UnsupportedCheckpoint(f"config.json: {key} is of type {kind!r} and has an mscale_all_dim", key)
    factor, mscale = number(scaling, "factor", 1.0), number(scaling, "mscale_all_dim", 1.0)
    return 0.1 * mscale * math.log(factor) + 1 if factor > 1 else 1.0


def listed_blocks(config: Mapping[str, Any], default: Sequence[bool]) -> tuple[bool, ...]:
    """Return which layers have experts: those that `mlp_layer_types` calls sparse.

    Raises:
        UnsupportedCheckpoint: unless it names every layer "dense" or "sparse".
    """
    types, key = config.get("mlp_layer_types"), "mlp_layer_types"
    if types is None:
        return tuple(default)
    if not isinstance(types, list | tuple) or len(types) != len(default):
        raise UnsupportedCheckpoint(f"config.json: {key} does not name {len(default)} layers", key)
    if not all(kind in ("dense", "sparse") for kind in types):
        raise UnsupportedCheckpoint(f"config.json: {key} names other layers than dense and sparse", key)
    return tuple(kind == "sparse" for kind in types)
