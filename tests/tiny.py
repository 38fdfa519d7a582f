"""Tiny random checkpoints, made by transformers, that the numerics are held against.

Weights are drawn wider than transformers draws them, so that logits are far from flat. Shapes keep
apart what is easily confused: query heads from key/value heads, local from global layers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

VOCAB = 509
"""A prime, so that no mesh axis divides it unless a test asks for another."""


def gemma4_text(**overrides: Any) -> dict[str, Any]:
    """Fields of Gemma4TextConfig: five sliding layers and one full."""
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "global_head_dim": 32,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "sliding_window": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": 2,
        **overrides,
    }


def make_gemma4(
    directory: Path, multimodal: bool = True, shards: int = 1, seed: int = 0, **overrides: Any
) -> Any:
    """Writes a Gemma 4 checkpoint in float32 and returns transformers' model.

    Args:
        directory: is created.
        multimodal: the layout of google/gemma-4-31B-it (model.language_model.*, with a vision tower)
            instead of the text-only one (model.*).
        shards: at least how many files the weights are split over.
        seed: of the weights.
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
            },
            audio_config=None,
            **{
                f"{name}_token_id": vocab - 1 - i
                for i, name in enumerate(("image", "audio", "video", "boi", "eoi", "boa"))
            },
        )
        build = transformers.Gemma4ForConditionalGeneration
    else:
        config = transformers.Gemma4TextConfig(**text)
        build = transformers.Gemma4ForCausalLM
    return _write(build, config, directory, shards, seed)


def make_gemma3(directory: Path, shards: int = 1, seed: int = 0, **overrides: Any) -> Any:
    """Writes a text-only Gemma 3 checkpoint in float32 and returns transformers' model.

    Args:
        directory: is created.
        shards: at least how many files the weights are split over.
        seed: of the weights.
        overrides: fields of Gemma3TextConfig.
    """
    import transformers

    config = transformers.Gemma3TextConfig(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 8,
            "max_position_embeddings": 512,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": 2,
            **overrides,
        }
    )
    return _write(transformers.Gemma3ForCausalLM, config, directory, shards, seed)


def _write(build: Any, config: Any, directory: Path, shards: int, seed: int) -> Any:
    import torch

    torch.manual_seed(seed)
    config.dtype = "float32"
    model = build(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim < 2:
                # Norms and scalars: around what they start from (0 in Gemma 3, 1 in Gemma 4).
                parameter.add_(0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("layer_scalar"):
                buffer.add_(0.1 * torch.randn(buffer.shape, generator=generator))
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    directory.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(directory, max_shard_size=size // shards if shards > 1 else "5GB")
    return model
