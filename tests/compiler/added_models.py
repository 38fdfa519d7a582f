"""A hub's model that no catalog has, and its folder next to a recipe."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from recipec.compiler.hub.fetch import TENSORS, Fetched, write
from recipec.compiler.miniature.small_checkpoint import complete, write_checkpoint
from recipec.runtime.weights.checkpoint import HFCheckpoint

ID = "somebody/Qwen3-tiny"
FOLDER = Path("models/somebody--Qwen3-tiny")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONFIG = complete(
    {
        "model_type": "qwen3",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    }
)

Tensors = dict[str, tuple[str, list[int]]]


def checkpoint(folder: Path) -> dict[str, bytes]:
    """Write a miniature checkpoint, and return its files."""
    write_checkpoint(folder, CONFIG)
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def tensors_of(folder: Path) -> Tensors:
    """Return the type and shape of each tensor of a checkpoint."""
    return {name: (one.dtype, list(one.shape)) for name, one in HFCheckpoint.open(folder).tensors.items()}


def add(
    recipes: Path,
    files: Mapping[str, bytes],
    tensors: Tensors | bytes,
    id: str = ID,
    revision: str | None = None,
) -> Path:
    """Write a model's folder next to a folder's recipes, as `recipe models add` does.

    Args:
        files: of the repository; only the files that a compilation needs are written.
        tensors: from `tensors_of`, all in one file; or the text of the list.
    """
    listed = tensors if isinstance(tensors, bytes) else json.dumps({"model.safetensors": tensors}).encode()
    kept = {
        name: content
        for name, content in files.items()
        if not name.startswith("model") and name.endswith((".json", ".jinja"))
    }
    fetched = Fetched(id, revision, COMMIT, id, {**kept, TENSORS: listed}, {})
    return write(fetched, recipes / "models")
