"""Tiny gpt-oss checkpoints in the published format, with experts in MXFP4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from recipec.runtime.weights.safetensors_files import write_arrays
from tests.runtime import decoders

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
"""Two and three groups of 32 numbers."""
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
PROJECTIONS = ("gate_up_proj", "down_proj")


def make(folder: Path) -> Any:
    """Write a checkpoint, and return transformers' model of the values that its own code dequantizes.

    The checkpoint has two files. One layer's scales are in another file than its blocks.
    """
    model = decoders.make("gpt_oss", folder, **SIZES)
    random = np.random.default_rng(5)
    arrays = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i, layer in enumerate(model.model.layers):
        for name in PROJECTIONS:
            whole = f"model.layers.{i}.mlp.experts.{name}"
            experts, inputs, outputs = arrays.pop(whole).shape
            shape = (experts, outputs, inputs // 32)
            arrays[f"{whole}_blocks"] = random.integers(0, 256, (*shape, 16), np.uint8)
            # About inputs ** -0.5 in size, as the decoders' weights are.
            arrays[f"{whole}_scales"] = random.integers(121, 125, shape, np.uint8)
            pair = (torch.tensor(arrays[f"{whole}_{half}"]) for half in ("blocks", "scales"))
            with torch.no_grad():
                getattr(layer.mlp.experts, name).copy_(convert_moe_packed_tensors(*pair).float())
    split = {name: FILES["lm_head" in name or "layers.1" in name] for name in arrays}
    split["model.layers.1.mlp.experts.down_proj_blocks"] = FILES[0]
    for file in FILES:
        with (folder / file).open("wb") as opened:
            held = ((name, arrays[name]) for name in arrays if split[name] == file)
            write_arrays(opened, held, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": split}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": METHOD}))
    return model
