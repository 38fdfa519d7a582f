"""Tiny checkpoints in the published forms of FP8: scales of blocks, or one for each matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import transformers
from safetensors.numpy import load_file

from recipec.runtime.weights.safetensors_files import write_arrays
from tests.runtime import decoders

BLOCK = (4, 12)
FILES = tuple(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3))


def make(case: str, folder: Path, block: tuple[int, int] | None) -> Any:
    """Write a checkpoint in three files and return transformers' model of what its own code dequantizes.

    The projections of the decoder are in FP8; the scales of one are in the file of the other tensors, those
    of another in a file of their own. Without a block, each has one scale, and one for activations, as
    Mistral publishes them.
    """
    decoders.make(case, folder)
    arrays = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if value.ndim == 2 and ".layers." in name and "vision" not in name and ".gate.weight" not in name:
            codes, scales = quantized(value, block)
            arrays |= {name: codes, f"{name}_scale_inv": scales}
            if block is None:
                arrays[name.replace("weight", "activation_scale")] = np.array(0.5, ml_dtypes.bfloat16)
        else:
            arrays[name] = value.astype(ml_dtypes.bfloat16)
    (folder / "model.safetensors").unlink()
    split = {name: FILES[".layers." not in name] for name in arrays}
    first, second, *_ = (name for name in arrays if name.endswith("_scale_inv"))
    split |= {first: FILES[1], second: FILES[2]}
    for file in FILES:
        with (folder / file).open("wb") as opened:
            write_arrays(opened, ((n, arrays[n]) for n in arrays if split[n] == file), {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": split}))
    describe(folder, quant_method="fp8", weight_block_size=block and list(block))
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    return getattr(transformers, kind).from_pretrained(
        folder,
        dtype="bfloat16",
        attn_implementation="eager",
        quantization_config=transformers.FineGrainedFP8Config(
            dequantize=True, weight_block_size=block, modules_to_not_convert=["lm_head", "vision_tower"]
        ),
    )


def describe(folder: Path, **method: Any) -> None:
    """Set the quantization_config of a checkpoint."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": method}))


def quantized(value: np.ndarray, block: tuple[int, int] | None) -> tuple[np.ndarray, np.ndarray]:
    """Return codes, and the scales with which the largest number of each block is FP8's largest."""
    (rows, columns), (height, width) = value.shape, block or value.shape
    padded = np.pad(np.abs(value), ((0, -rows % height), (0, -columns % width)))
    blocks = padded.reshape(len(padded) // height, height, -1, width)
    scales = np.maximum(blocks.max((1, 3)), 1e-6).astype(np.float32) / 448
    whole = scales.repeat(height, 0).repeat(width, 1)[:rows, :columns]
    codes = (value / whole).astype(ml_dtypes.float8_e4m3fn)
    return codes, scales if block else scales.reshape(())
