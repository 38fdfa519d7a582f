"""Tiny multimodal checkpoints with towers, processors and tokenizers, made by transformers' own classes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from recipec.compiler.catalog import facts_of
from recipec.compiler.miniature.small_checkpoint import VOCABULARY, write_tokenizer
from recipec.compiler.miniature.small_towers import Tower, gemma3_processor
from tests import tiny

SIGLIP = {
    "hidden_size": 36,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 24,
    "patch_size": 4,
    "vision_use_head": False,
}
"""A grid of 6 x 6 patches, and heads that no mesh axis divides."""

TEXT = {
    "vocab_size": VOCABULARY + 9,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": 2,
}
"""The text models' sizes; the vocabulary is a prime."""

SLIDING, FULL = "sliding_attention", "full_attention"


def make_gemma3(
    folder: Path, texts: Sequence[str] = (), seed: int = 0, tokens: int = 9, **changes: Any
) -> Any:
    """Write a Gemma 3 checkpoint with pictures of 36 patches, and return transformers' model.

    A picture is longer than the window of the sliding layers.

    Args:
        folder: is created.
        texts: texts from which to learn the tokenizer's merges.
        seed: of the weights.
        tokens: of a picture.
        changes: of the text's config.json.
    """
    import transformers

    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "layer_types": [SLIDING, FULL, SLIDING],
            **changes,
        },
        vision_config=SIGLIP,
        mm_tokens_per_image=tokens,
        **facts_of("gemma3").tokens.media,
    )
    config._attn_implementation = "eager"
    model = tiny.write(transformers.Gemma3ForConditionalGeneration, config, folder, seed=seed)
    write_tokenizer(folder, "gemma3", texts)
    tower = Tower(SIGLIP, {}, *gemma3_processor(SIGLIP["image_size"], tokens))
    for name, value in tower.files.items():
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    return model


def publish(folder: Path) -> None:
    """Rename the tower's tensors of a Gemma 3 checkpoint as on the hub; transformers 5 saves other names."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    names = {name: name.replace("vision_tower.", "vision_tower.vision_model.", 1) for name in tensors}
    save_file({names[name]: value for name, value in tensors.items()}, file, metadata={"format": "pt"})
