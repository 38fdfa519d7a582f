"""The projections of Gemma 2 and 3, whose queries, keys and values may be one array."""

from __future__ import annotations

from .base import Architecture, LoraTarget, Parameter, mlp_lora_targets, projection
from .gemma import keys_and_values, output, query


def fused_attention(a: Architecture, layer: str) -> list[Parameter]:
    """Return the projections of a layer of Gemma 2 or 3.

    Queries, keys and values are one array if they have the same number of heads; otherwise queries are apart.
    """
    d, n, k, h = a.hidden_size, a.num_heads, a.num_kv_heads, a.head_dim
    q, *kv = (
        projection(f"{layer}.self_attn.{name}_proj.weight", heads, h, d)
        for name, heads in (("q", n), ("k", k), ("v", k))
    )
    if n == k:
        spec = (None, "tp", "fsdp", None)
        fused = [Parameter(f"{layer}.attn.qkv_einsum.w", (3, n, d, h), spec, (q, *kv))]
    else:
        fused = [query(layer, n, h, d), keys_and_values(layer, k, h, d, tuple(kv))]
    return [*fused, output(layer, n, h, d)]


def fused_lora_targets(architecture: Architecture) -> list[LoraTarget]:
    """Return the LoRA targets of such layers."""
    out = []
    for i in range(architecture.num_layers):
        attn = f"layers.{i}.attn"
        q, k, v, o = (f"self_attn.{name}_proj" for name in "qkvo")
        if architecture.num_heads == architecture.num_kv_heads:
            out.append(LoraTarget(i, f"{attn}.qkv_einsum.w", (2,), (q, k, v)))
        else:
            out.append(LoraTarget(i, f"{attn}.q_einsum.w", (1,), (q,)))
            out.append(LoraTarget(i, f"{attn}.kv_einsum.w", (2,), (k, v)))
        out.append(LoraTarget(i, f"{attn}.attn_vec_einsum.w", (0, 1), (o,)))
        out += mlp_lora_targets(i)
    return out
