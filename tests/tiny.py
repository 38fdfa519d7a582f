"""Tiny random checkpoints, made by transformers, as references for numerics.

Weights have a larger spread than in transformers, so that logits are far from flat. Shapes differ wherever a
mix-up is likely: query heads and key/value heads, local and global layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

VOCAB = 509
"""A prime, so that no mesh axis divides it unless a test asks for another."""


def _fields(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a text model's configuration, with its own in addition or instead."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **own,
    }


def gemma4_text(**overrides: Any) -> dict[str, Any]:
    """Return fields of Gemma4TextConfig: five sliding layers and one full layer."""
    own = {
        "num_hidden_layers": 6,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
    }
    return _fields(own | overrides)


GEMMA4_AUDIO: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "output_proj_dims": 16,
    "subsampling_conv_channels": [4, 4],
}


def make_gemma4(
    directory: Path,
    multimodal: bool = True,
    shards: int = 1,
    seed: int = 0,
    audio: bool = False,
    vision: Mapping[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """Write a Gemma 4 checkpoint in float32 and return transformers' model.

    Args:
        directory: the new folder.
        multimodal: use the layout of google/gemma-4-31B-it (model.language_model.*, with a vision tower)
            instead of the text-only one (model.*).
        shards: minimum number of weight files.
        seed: the weights' seed.
        audio: add an audio tower, as E2B and E4B have.
        vision: fields of Gemma4VisionConfig that replace those here.
        overrides: fields of Gemma4TextConfig.
    """
    import transformers

    text = gemma4_text(**overrides)
    if multimodal:
        vocab = text["vocab_size"]
        config = transformers.Gemma4Config(
            text_config=text,
            vision_config={
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "global_head_dim": 16,
                **(vision or {}),
            },
            audio_config=dict(GEMMA4_AUDIO) if audio else None,
            **{
                f"{name}_token_id": vocab - 1 - i
                for i, name in enumerate(("image", "audio", "video", "boi", "eoi", "boa"))
            },
        )
        build = transformers.Gemma4ForConditionalGeneration
    else:
        config = transformers.Gemma4TextConfig(**text)
        build = transformers.Gemma4ForCausalLM
    return write(build, config, directory, shards, seed)


def make_gemma4_unified(directory: Path, shards: int = 1, seed: int = 0, **overrides: Any) -> Any:
    """Write a checkpoint as google/gemma-4-12B, in float32, and return transformers' model.

    Args:
        directory: is created.
        shards: minimum number of files for the weights.
        seed: of the weights.
        overrides: fields of Gemma4UnifiedTextConfig.
    """
    import transformers

    text = gemma4_text(**overrides)
    config = transformers.Gemma4UnifiedConfig(
        text_config={key: value for key, value in text.items() if "per_layer_input" not in key},
        vision_config={
            **{"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 8},
            **{"patch_size": 2, "pooling_kernel_size": 2},
        },
        audio_config={"audio_embed_dim": 16},
        **{
            f"{name}_token_id": text["vocab_size"] - 1 - i
            for i, name in enumerate(("image", "audio", "video", "boi", "boa"))
        },
    )
    return write(transformers.Gemma4UnifiedForConditionalGeneration, config, directory, shards, seed)


def _causal(
    name: str, own: Mapping[str, Any], directory: Path, shards: int = 1, seed: int = 0, **overrides: Any
) -> Any:
    """Write a text-only checkpoint in float32 and return transformers' model.

    Args:
        name: the start of the names of its classes.
        own: fields of its configuration.
        directory: the new folder.
        shards: minimum number of weight files.
        seed: the weights' seed.
        overrides: fields that replace those.
    """
    import transformers

    config = getattr(transformers, f"{name}Config")(**_fields(deepcopy({**own, **overrides})))
    build = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    return write(build, config, directory, shards, seed)


LLAMA3_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Llama 3.1's scaling of a context of 32 tokens. At a head size of 16, the first pair of features keeps its
frequency, the second's is interpolated, and the others' are divided by 8."""

ODD_WIDTHS = {
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}

make_gemma3 = partial(
    _causal,
    "Gemma3Text",
    {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 8},
)
make_llama = partial(_causal, "Llama", {"head_dim": 16, "rope_parameters": dict(LLAMA3_ROPE)})
"""Llama 3, with a separate output head and scaled frequencies."""
make_qwen2 = partial(_causal, "Qwen2", {"head_dim": 16, "tie_word_embeddings": True})
"""Qwen 2.5, with a tied head."""
make_qwen3 = partial(_causal, "Qwen3", {"head_dim": 32, "tie_word_embeddings": True})
make_gemma2 = partial(
    _causal,
    "Gemma2",
    {
        **{"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 8},
        **{"attn_logit_softcapping": 2.0, "attn_implementation": "eager"},
    },
)
"""Gemma 2, whose soft-caps are low enough to bend the scores.

The scores are scaled by another number than the head size, as in the 27B. Attention is transformers' eager
one, because its other ones ignore the soft-cap.
"""
make_helium = partial(_causal, "Helium", {**ODD_WIDTHS, "head_dim": 8, "attention_bias": True})
"""Helium, whose attention has biases and rotates neighboring features."""
make_bamba = partial(
    _causal,
    "Bamba",
    {
        **ODD_WIDTHS,
        "attn_layer_indices": [1],
        **{"mamba_n_heads": 12, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12},
        "mamba_chunk_size": 5,
    },
)
"""Bamba: a layer of Mamba 2, whose chunks do not divide a row, and attention."""


TABLES = ("embed_tokens", "lm_head", "embed_in", "embed_out", "word_embeddings")
"""Parts of the names of embeddings and output heads."""


def write(build: Any, config: Any, directory: Path, shards: int = 1, seed: int = 0) -> Any:
    """Save a model of a configuration with random weights into a folder, and return it."""
    import torch

    torch.set_num_threads(1)  # with models this small, several threads mostly wait for each other
    torch.manual_seed(seed)
    config.dtype = torch.float32
    model = build(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                # Norms and scalars are drawn around their initial values (0 in Gemma 3, 1 in Gemma 4).
                parameter.add_(0.1 * noise)
            elif any(table in name for table in TABLES):
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith(("layer_scalar", "e_score_correction_bias")):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=size // shards if shards > 1 else "5GB")
    return model


GEMMA4_E2B: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [*["sliding_attention"] * 2, *["full_attention", "sliding_attention", "full_attention"]],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "num_key_value_heads": 1,
    "num_global_key_value_heads": None,
    "attention_k_eq_v": False,
}
"""Makes a text config like Gemma 4 E2B's: layer 3 reuses layer 1's keys and values, layer 4 those of
layer 2."""

GEMMA4_EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "enable_moe_block": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
"""Makes a text config like Gemma 4 26B-A4B's: experts next to each dense block."""
