"""The base of the merge's measurement, of random numbers, and a run of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

ROOT = Path(__file__).resolve().parent.parent.parent
MODEL = "google/gemma-4-31B-it"

RANK = 64
SHARD = 3_000_000_000
"""The most bytes of tensors in a file of the base."""


def config(layers: int, vocabulary: int) -> dict[str, Any]:
    """Return a text-only config.json of the model's last layers, 6 at most."""
    from recipec.compiler.miniature.small_checkpoint import complete

    models = json.loads((ROOT / "compiler" / "data" / "models.json").read_text(encoding="utf-8"))
    text = models[MODEL]["config"]["text_config"]
    return complete(
        {
            **text,
            "num_hidden_layers": layers,
            "layer_types": (["sliding_attention"] * 5 + ["full_attention"])[-layers:],
            "vocab_size": vocabulary,
            "vocab_size_per_layer_input": vocabulary,
            "tie_word_embeddings": True,
        }
    )


def write_base(folder: Path, layers: int, vocabulary: int) -> None:
    """Write config.json, and weights that repeat 64 MiB of random numbers from different offsets."""
    from recipec.runtime.model.families import family_of
    from recipec.runtime.weights.safetensors_files import encode_header

    settings = config(layers, vocabulary)
    family = family_of(settings)
    tensors = [
        (source.full_name("model."), source.shape, 2 * math.prod(source.shape))
        for parameter in family.parameters(family.architecture(settings))
        for source in parameter.sources
    ]
    files: list[list[tuple[str, tuple[int, ...], int]]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(size for _, _, size in files[-1]) + tensor[2] > SHARD:
            files.append([])
        files[-1].append(tensor)
    folder.mkdir()
    random = np.random.default_rng(0)
    values = (random.standard_normal(1 << 25, dtype=np.float32) * np.float32(0.02)).astype(ml_dtypes.bfloat16)
    noise = memoryview(values.view(np.uint8))
    weight_map = {}
    for number, file in enumerate(files, start=1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        with (folder / name).open("wb") as stream:
            header = encode_header({t: ("BF16", shape, size) for t, shape, size in file}, {"format": "pt"})
            stream.write(len(header).to_bytes(8, "little") + header)
            for tensor, _, size in file:
                weight_map[tensor] = name
                place = 2 * int(random.integers(len(values)))
                while size:
                    block = noise[place : place + size]
                    stream.write(block)
                    size, place = size - len(block), 0
    index = {"metadata": {"total_size": sum(size for *_, size in tensors)}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n")


def write_run(folder: Path, base: Path) -> int:
    """Write a checkpoint of random adapters for the base, and return their bytes."""
    from recipec.runtime.weights.checkpoint import HFCheckpoint
    from tests.runtime.runs import lora_section, save_run

    section = lora_section(rank=RANK, alpha=float(RANK))
    # Make deltas of about a tenth of the weights: larger than a rounding, but not dominant.
    adapters = save_run(folder, HFCheckpoint.open(base), section, scale=0.02)
    return 4 * sum(math.prod(one.a_shape) + math.prod(one.b_shape) for one in adapters)
