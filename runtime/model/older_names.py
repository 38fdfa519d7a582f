"""The names that version 0.2 gave to arrays of Gemma 2, 3 and 4, whose models were then Tunix's.

Queries, keys and values that were one array are now arrays of their own, and the features of the input come
first: in 0.2 a query's weight was [heads, in, features].
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import UserError

OF_LAYER = {
    "attn.q_einsum": ("attn.q_proj",),
    "attn.k_einsum": ("attn.k_proj",),
    "attn.kv_einsum": ("attn.k_proj", "attn.v_proj"),
    "attn.qkv_einsum": ("attn.q_proj", "attn.k_proj", "attn.v_proj"),
    "attn.attn_vec_einsum": ("attn.o_proj",),
    "attn._query_norm.scale": ("attn.q_norm.w",),
    "attn._key_norm.scale": ("attn.k_norm.w",),
    "pre_attention_norm.scale": ("input_layernorm.w",),
    "post_attention_norm.scale": ("post_attention_layernorm.w",),
    "post_attn_norm.scale": ("post_attention_layernorm.w",),
    "pre_ffw_norm.scale": ("pre_feedforward_layernorm.w",),
    "post_ffw_norm.scale": ("post_feedforward_layernorm.w",),
    "moe_pre_ffw_norm.scale": ("pre_feedforward_layernorm_2.w",),
    "moe_post_ffw_norm.scale": ("post_feedforward_layernorm_2.w",),
    "dense_post_ffw_norm.scale": ("post_feedforward_layernorm_1.w",),
    "post_per_layer_input_norm.scale": ("post_per_layer_input_norm.w",),
    "per_layer_input_gate.w": ("per_layer_input_gate.kernel",),
    "per_layer_projection.w": ("per_layer_projection.kernel",),
    "moe.router_logits": ("moe.router.kernel",),
    "moe.gating_einsum": ("moe.experts.gate_up",),
    "moe.linear": ("moe.experts.down",),
    "skip_scale": ("layer_scalar",),
}
"""What 0.2 named an array of a layer, and what it is named now; several names for what was one array."""

OF_MODEL = {
    "final_norm.scale": ("final_norm.w",),
    "embedder.per_layer_projection_norm.scale": ("embedder.per_layer_projection_norm.w",),
}
"""The same for arrays outside of layers."""


def mentioned(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield the older names of modules that a regular expression of paths mentions, and the first name of
    each now."""
    for old, new in {**OF_LAYER, **OF_MODEL}.items():
        before, after = (
            name.removeprefix("attn.").removeprefix("moe.").partition(".")[0] for name in (old, new[0])
        )
        if before != after and re.search(rf"(?<![a-z_]){before}(?![a-z_])", pattern):
            yield before, after


def of_older_version(record: Mapping[str, Any]) -> bool:
    """Return whether a run's record is of version 0.2 and of a family whose arrays had these names."""
    model = record.get("model") or {}
    older = isinstance(model.get("architecture"), Mapping) and "places" not in model["architecture"]
    return model.get("family") in ("gemma2", "gemma3", "gemma4") and older


def older_run(where: str) -> UserError:
    """Return the error for a run of that version."""
    return UserError(
        f"{where} holds a run of version 0.2, which gave Gemma's arrays other names",
        "finish and merge it with the artifact that started it, whose runtime is of that version",
    )
