"""config.json of a miniature: a model's family, layer pattern and key/value layout at a toy's size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from runtime.families import Architecture
from runtime.families.dense import DenseArchitecture
from runtime.families.gemma2 import Gemma2Architecture
from runtime.families.gemma3 import Gemma3Architecture
from runtime.families.gemma4 import Gemma4Architecture

VOCABULARY = 512
WINDOW = 16
"""Tokens that a local layer sees: few enough that rehearsed sequences are longer."""


def shrink(
    architecture: Architecture, axes: Mapping[str, int] | None = None, multimodal: bool = True
) -> dict[str, Any]:
    """A config.json of the same family, with one whole period of the layer pattern.

    The ratio of query, key/value and global key/value heads is kept, and every size that a mesh axis
    splits is a multiple of that axis.

    Args:
        architecture: of the original.
        axes: the mesh that the miniature is trained on.
        multimodal: whether the checkpoint has the multimodal layout, with a vision tower.
    """
    step = math.lcm(8, *(axes or {}).values())
    tp = (axes or {}).get("tp", 1)
    hidden, head_dim = _multiple(64, step), _multiple(16, step)
    layers = period(architecture.layer_types)
    layers = layers if len(layers) > 1 else 2 * layers
    text: dict[str, Any] = {
        "vocab_size": _multiple(VOCABULARY, step),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": len(layers),
        "layer_types": list(layers),
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
    }
    if isinstance(architecture, DenseArchitecture):
        return complete(text | _dense(architecture, text, tp, step))
    text |= {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": WINDOW}
    if isinstance(architecture, Gemma4Architecture):
        text |= _gemma4(architecture, text, tp)
    elif isinstance(architecture, Gemma3Architecture):
        text |= _gemma3(architecture, text, tp)
    elif isinstance(architecture, Gemma2Architecture):
        text |= _gemma2(architecture, text, tp)
    else:
        raise ValueError(f"there is no miniature of the family {architecture.family}")
    return complete({"text_config": text} if multimodal else text)


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A text config, or one nested in `text_config`, with what transformers wants beside it.

    The nested form becomes the multimodal model, with a small vision tower.
    """
    nested = config.get("text_config")
    text = dict(nested if isinstance(nested, Mapping) else config)
    kind = str(text.get("model_type"))
    family = next((name for name in ("gemma3", "gemma4") if name in kind), kind)
    if family in ("gemma3", "gemma4"):
        text["model_type"] = f"{family}_text"
    if nested is None:
        return {"architectures": [_CLASSES[family] + "ForCausalLM"], **text, "dtype": "bfloat16"}
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    whole: dict[str, Any] = {
        "architectures": [_CLASSES[family] + "ForConditionalGeneration"],
        "model_type": family,
        "dtype": "bfloat16",
        "tie_word_embeddings": True,
        "text_config": text,
    }
    if family == "gemma4":
        whole["vision_config"] = {
            "model_type": "gemma4_vision",
            **vision,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
            "default_output_length": 16,
        }
        whole["audio_config"] = None
    else:
        whole["vision_config"] = {
            "model_type": "siglip_vision_model",
            **vision,
            "image_size": 32,
            "patch_size": 8,
            "num_channels": 3,
            "vision_use_head": False,
        }
        whole["mm_tokens_per_image"] = 4
    return whole | MARKER_IDS[family]


_CLASSES = {
    "gemma2": "Gemma2",
    "gemma3": "Gemma3",
    "gemma4": "Gemma4",
    "llama": "Llama",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
}

MARKER_IDS: dict[str, dict[str, int]] = {
    "gemma3": {"boi_token_index": 6, "eoi_token_index": 7, "image_token_index": 8},
    "gemma4": {
        "boi_token_id": 6,
        "image_token_id": 7,
        "eoi_token_id": 8,
        "video_token_id": 9,
        "boa_token_id": 10,
        "audio_token_id": 11,
        "eoa_token_index": 12,
    },
}
"""Ids of the markers that stand for images and sound, as miniature_tokenizer lays them out."""

MARKER_ENDS = {"gemma2": 5, "gemma3": 5, "gemma4": 5, "llama3": 1, "qwen2": 1, "qwen3": 1}
"""Id of the marker that closes a turn."""

_DENSE_TYPES = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}


def _dense(a: DenseArchitecture, text: Mapping[str, Any], tp: int, step: int) -> dict[str, Any]:
    heads, kv_heads = _heads((a.num_heads, a.num_kv_heads), tp)
    rope: dict[str, Any] = {"rope_type": a.rope.kind, "rope_theta": a.rope.theta}
    if a.rope.kind != "default":
        rope["factor"] = a.rope.factor
    if a.rope.kind == "llama3":
        # The context before it was extended is short enough that rehearsed positions are scaled.
        rope |= {
            "low_freq_factor": a.rope.low,
            "high_freq_factor": a.rope.high,
            "original_max_position_embeddings": 64,
        }
    out = {
        "model_type": _DENSE_TYPES[a.family],
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": a.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": a.tied,
    }
    if a.family == "llama3":
        # transformers wants a hidden size that the heads divide, head_dim or not.
        return out | {"mlp_bias": False, "hidden_size": _multiple(text["hidden_size"], math.lcm(step, heads))}
    out["use_sliding_window"] = False
    # Qwen 2.5's heads are as wide as the hidden size allows, and its config.json does not say so.
    return out | {"hidden_size": heads * text["head_dim"]} if a.family == "qwen2" else out


def _gemma2(a: Gemma2Architecture, text: Mapping[str, Any], tp: int) -> dict[str, Any]:
    heads, kv_heads = _heads((a.num_heads, a.num_kv_heads), tp)
    share = a.query_scalar / a.head_dim
    return {
        "model_type": "gemma2",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "query_pre_attn_scalar": round(share * text["head_dim"]),
        "attn_logit_softcapping": a.attention_softcap,
        "final_logit_softcapping": a.softcap,
        "rope_parameters": {"rope_type": "default", "rope_theta": a.theta},
    }


def _gemma4(a: Gemma4Architecture, text: Mapping[str, Any], tp: int) -> dict[str, Any]:
    heads, kv_heads, global_kv_heads = _heads((a.num_heads, a.num_kv_heads, a.global_kv_heads), tp)
    layers = list(text["layer_types"])
    if a.kv_shared_layers:
        layers *= 2
    return {
        "model_type": "gemma4_text",
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_global_key_value_heads": global_kv_heads,
        "global_head_dim": text["head_dim"] * max(1, a.global_head_dim // a.head_dim),
        "attention_k_eq_v": a.k_eq_v,
        "final_logit_softcapping": a.softcap,
        "num_kv_shared_layers": len(layers) // 2 if a.kv_shared_layers else 0,
        "use_double_wide_mlp": a.shared_intermediate_size != a.intermediate_size,
        "hidden_size_per_layer_input": text["head_dim"] if a.per_layer_input else 0,
        "vocab_size_per_layer_input": text["vocab_size"],
        "enable_moe_block": bool(a.experts),
        "num_experts": 8 if a.experts else None,
        "top_k_experts": 2 if a.experts else None,
        "moe_intermediate_size": text["hidden_size"] if a.experts else None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": a.global_rope_share,
                "rope_theta": float(a.global_theta),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": float(a.local_theta)},
        },
    }


def _gemma3(a: Gemma3Architecture, text: Mapping[str, Any], tp: int) -> dict[str, Any]:
    heads, kv_heads = _heads((a.num_heads, a.num_kv_heads), tp)
    per_head = text["hidden_size"] // heads
    head_dim = text["head_dim"]
    if a.query_scale_heads and per_head == head_dim:
        # Else the two ways of scaling queries would be one.
        head_dim *= 2
    scaled = {"rope_type": "linear", "factor": a.global_scale} if a.global_scale != 1 else {}
    return {
        "model_type": "gemma3_text",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "query_pre_attn_scalar": per_head if a.query_scale_heads else head_dim,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", **scaled, "rope_theta": float(a.global_theta)},
            "sliding_attention": {"rope_type": "default", "rope_theta": float(a.local_theta)},
        },
    }


def period(layer_types: Sequence[str]) -> tuple[str, ...]:
    """The shortest run of layers whose repetition is the whole pattern."""
    for length in range(1, len(layer_types) + 1):
        if all(kind == layer_types[i % length] for i, kind in enumerate(layer_types)):
            return tuple(layer_types[:length])
    return tuple(layer_types)


def _heads(counts: Sequence[int], tp: int) -> list[int]:
    """The smallest counts of the same ratios that tp divides where it divides the original's."""
    unit = math.gcd(*counts)
    small = [count // unit for count in counts]
    factor = math.lcm(
        *(tp // math.gcd(tp, s) for s, count in zip(small, counts, strict=True) if count % tp == 0)
    )
    return [s * factor for s in small]


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of
