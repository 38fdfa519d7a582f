"""Models in transformers: some with multimodal names, and the logits of any model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import tiny


def make_gemma3_multimodal(directory: Path, layers: int = 6) -> Any:
    """Write Gemma 3 in the layout of google/gemma-3-4b-it (language_model.model.*), in float32."""
    text = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "initializer_range": 0.2,
        "pad_token_id": 0,
    }
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        **{f"{name}_index": 508 - i for i, name in enumerate(("image_token", "boi_token", "eoi_token"))},
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    model.save_pretrained(directory)
    return model


def make_qwen3_5_multimodal(directory: Path, experts: bool = False) -> Any:
    """Write Qwen 3.5 in the layout of Qwen/Qwen3.5-9B.

    Its names are model.language_model.*, model.visual.*, and mtp.* for layers that predict further tokens,
    which transformers does not load.

    Args:
        experts: use the layout of Qwen/Qwen3.5-35B-A3B, whose experts are stacked, except those of mtp.*.
    """
    text = {
        "vocab_size": tiny.VOCAB,
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 10,
        "rms_norm_eps": 1e-3,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32}
    tokens = ("image_token", "video_token", "vision_start_token", "vision_end_token")
    if experts:
        text |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        text |= {"shared_expert_intermediate_size": 20}
    name = "Qwen3_5Moe" if experts else "Qwen3_5"
    config = getattr(transformers, f"{name}Config")(
        text_config=text, vision_config=vision, **{f"{name}_id": 508 - i for i, name in enumerate(tokens)}
    )
    model = tiny.write(getattr(transformers, f"{name}ForConditionalGeneration"), config, directory)
    path = directory / "model.safetensors"
    further = {"mtp.fc.weight": torch.randn(32, 64), "mtp.layers.0.input_layernorm.weight": torch.randn(32)}
    arrays = load_file(path)
    if experts:
        further["mtp.layers.0.mlp.experts.0.gate_proj.weight"] = torch.randn(24, 32)
        together = {name: array for name, array in model.state_dict().items() if ".mlp.experts." in name}
        arrays = {name: array for name, array in arrays.items() if ".mlp.experts." not in name} | together
    save_file(arrays | further, path, metadata={"format": "pt"})
    return model


def in_float64(model: Any) -> Any:
    """Return a copy that computes in float64: a reference whose own rounding does not count."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # grouped products take no float64
    return exact


def torch_logits(model: Any, rows: dict[str, np.ndarray]) -> np.ndarray:
    """Return the logits of all tokens except padding. Rows run one by one, so that nothing is padded."""
    out = []
    with torch.no_grad():
        for tokens, segments in zip(rows["tokens"], rows["segment_ids"], strict=True):
            ids = torch.tensor(tokens[segments > 0][None], dtype=torch.long)
            out.append(model.eval()(input_ids=ids).logits[0].float().numpy())
    return np.concatenate(out)
