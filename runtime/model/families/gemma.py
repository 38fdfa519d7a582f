"""The common parts of the Gemma families: names and layouts of arrays, LoRA targets of fused projections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .base import Architecture, Parameter, Source, number, output_projection, plain, projection

NORMS = (
    ("pre_attention_norm", "input_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("pre_ffw_norm", "pre_feedforward_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
)
"""A layer's norms in Gemma 3 and 4: Tunix's name and Hugging Face's."""


def rotary_base(place: Mapping[str, Any], default: int, key: str = "rope_theta") -> float:
    """Read a rotary base; a whole number is an int, as Tunix has it."""
    theta = number(place, key, default)
    return int(theta) if theta.is_integer() else theta


def embedding(architecture: Architecture) -> Parameter:
    shape = (architecture.vocab_size, architecture.hidden_size)
    return Parameter(
        "embedder.input_embedding", shape, ("tp", "fsdp"), (plain("embed_tokens.weight", shape),)
    )


def norm(path: str, name: str, size: int, axis: str | None = "tp") -> Parameter:
    """Return a norm's scale; `axis` is the mesh axis that splits it."""
    return Parameter(f"{path}.scale", (size,), (axis,), (plain(f"{name}.weight", (size,)),))


def query(layer: str, heads: int, head_dim: int, hidden: int) -> Parameter:
    source = projection(f"{layer}.self_attn.q_proj.weight", heads, head_dim, hidden)
    return Parameter(f"{layer}.attn.q_einsum.w", (heads, hidden, head_dim), ("tp", "fsdp", None), (source,))


def keys_and_values(
    layer: str, heads: int, head_dim: int, hidden: int, sources: tuple[Source, ...]
) -> Parameter:
    """Return keys and values as one array. A single head cannot be split over tp: Tunix replicates it."""
    spec = (None, None if heads == 1 else "tp", "fsdp", None)
    return Parameter(f"{layer}.attn.kv_einsum.w", (2, heads, hidden, head_dim), spec, sources)


def output(layer: str, heads: int, head_dim: int, hidden: int) -> Parameter:
    source = output_projection(f"{layer}.self_attn.o_proj.weight", heads, head_dim, hidden)
    return Parameter(
        f"{layer}.attn.attn_vec_einsum.w", (heads, head_dim, hidden), ("tp", None, "fsdp"), (source,)
    )
