"""Llama checkpoints of random numbers in several files, of any size, made without transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from recipec.runtime.merging.file_plan import shard_name
from recipec.runtime.model.families import family_of
from recipec.runtime.weights.checkpoint import CONFIG, INDEX
from recipec.runtime.weights.safetensors_files import write_arrays

TINY: Mapping[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
"""The config of a model of 10 KB in bfloat16."""


def write_base(folder: Path, config: Mapping[str, Any] = TINY, files: int = 3, seed: int = 0) -> Path:
    """Write a checkpoint in bfloat16, with some other files, and return its folder.

    Args:
        config: config.json.
        files: the number of weight files, about equally large.
        seed: the weights' seed.
    """
    family = family_of(config)
    shapes = {
        source.full_name("model."): source.shape
        for parameter in family.parameters(family.architecture(config))
        for source in parameter.sources
    }
    random = np.random.default_rng(seed)
    folder.mkdir(parents=True)
    total = sum(int(np.prod(shape)) for shape in shapes.values())
    groups: list[dict[str, np.ndarray]] = [{} for _ in range(files)]
    begun = 0
    for name, shape in shapes.items():
        array = (random.standard_normal(shape, np.float32) * shape[-1] ** -0.5).astype(ml_dtypes.bfloat16)
        groups[min(files - 1, begun * files // total)][name] = array
        begun += array.size
    weight_map = {}
    for number, arrays in enumerate(groups, 1):
        file = shard_name(number, files)
        with (folder / file).open("wb") as out:
            write_arrays(out, arrays.items(), {"format": "pt"})
        weight_map |= dict.fromkeys(arrays, file)
    if files > 1:
        index = {"metadata": {"total_size": 2 * total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    (folder / CONFIG).write_text(json.dumps(dict(config), indent=2))
    (folder / "generation_config.json").write_text("{}\n")
    (folder / "tokenizer.json").write_text("{}\n")
    (folder / "README.md").write_text("# A base\n")
    return folder


def rewrite(path: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Change the arrays of a safetensors file."""
    from safetensors.numpy import load_file

    arrays = load_file(path)
    change(arrays)
    with path.open("wb") as out:
        write_arrays(out, arrays.items(), {"format": "pt"})


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
