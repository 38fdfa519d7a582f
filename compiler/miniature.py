"""Miniature checkpoints, of a configuration that compiler.miniature_config shrinks.

A miniature has random weights, wide enough that its logits are far from flat, in the layout of the
original: several safetensors files with an index, the multimodal tensors beside the text, tokenizer
and chat template. It is written without torch; numpy, safetensors and tokenizers are imported where
they are used.
"""

from __future__ import annotations

import json
import math
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler import miniature_vision
from compiler.miniature_config import MARKER_ENDS
from runtime.families import family_of

if TYPE_CHECKING:
    import numpy as np


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    texts: Sequence[str] = (),
    seed: int = 0,
    shards: int = 2,
    dtype: str = "bfloat16",
    embedding_scale: float = 0.5,
) -> None:
    """Writes config.json, the weights with their index, generation_config.json and the tokenizer.

    The directory appears whole or not at all; an existing one is replaced.

    Args:
        config: as from miniature_config's `shrink` or `complete`.
        texts: what the tokenizer's merges are learnt from; a few English sentences when empty.
        seed: of the weights. Each tensor's stream also depends on its name alone, so that the same
            tensor has the same values in every split.
        shards: number of safetensors files.
        dtype: "bfloat16" or "float32", of the weights.
        embedding_scale: standard deviation of the token embeddings, which sets how far the logits are
            from flat: about 8 times this at hidden size 64.
    """
    from compiler.miniature_tokenizer import write_tokenizer

    family = family_of(config)
    directory.parent.mkdir(parents=True, exist_ok=True)
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    tensors = {name: _tensor(name, shape, family.name, seed) for name, shape in _tensors(config)}
    for name in tensors:
        if "embed_tokens" in name or name == "lm_head.weight":
            tensors[name] *= embedding_scale
    _write_shards(partial, {name: _cast(tensor, dtype) for name, tensor in tensors.items()}, shards)
    _write_json(partial / "config.json", dict(config) | {"dtype": dtype})
    _write_json(
        partial / "generation_config.json",
        {"bos_token_id": 2, "eos_token_id": [1, MARKER_ENDS[family.name]], "pad_token_id": 0},
    )
    write_tokenizer(partial, family.name, texts)
    shutil.rmtree(directory, ignore_errors=True)
    partial.rename(directory)


def _tensors(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor of the checkpoint with its shape: the text in layer order, then the vision tower."""
    family = family_of(config)
    multimodal = "vision_config" in config
    prefix = "model.language_model." if multimodal else "model."
    for parameter in family.parameters(family.architecture(config)):
        for source in parameter.sources:
            yield source.full_name(prefix), source.shape
    if multimodal:
        vision = miniature_vision.gemma4 if family.name == "gemma4" else miniature_vision.gemma3
        yield from vision(config["vision_config"], config["text_config"]["hidden_size"])


def _tensor(name: str, shape: tuple[int, ...], family: str, seed: int) -> np.ndarray:
    """Random values: matrices keep their input's variance, norms stay near the one that does nothing."""
    import numpy as np

    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = generator.standard_normal(shape, dtype=np.float32)
    if "embed_tokens" in name or "position_embedding" in name or name == "lm_head.weight":
        return values
    if len(shape) > 1:
        return values * np.float32(math.prod(shape[1:]) ** -0.5)
    if name.endswith(".bias"):
        return values * np.float32(0.1)
    # Gemma 2 and 3 multiply by 1 + weight, the others by the weight.
    neutral = 0.0 if family in ("gemma2", "gemma3") and "norm.weight" in name else 1.0
    return np.float32(0.1) * values + np.float32(neutral)


def _cast(values: np.ndarray, dtype: str) -> np.ndarray:
    import ml_dtypes
    import numpy as np

    return values.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)


def _write_shards(directory: Path, tensors: Mapping[str, np.ndarray], shards: int) -> None:
    """Splits the tensors, in order, into files of about the same size, and writes their index."""
    from safetensors.numpy import save_file

    total = sum(tensor.nbytes for tensor in tensors.values())
    groups: list[dict[str, np.ndarray]] = [{} for _ in range(shards)]
    done = 0
    for name, tensor in tensors.items():
        groups[min(shards - 1, done * shards // total)][name] = tensor
        done += tensor.nbytes
    weight_map: dict[str, str] = {}
    for i, group in enumerate(groups, start=1):
        file = f"model-{i:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        save_file(group, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(group, file)
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(directory / "model.safetensors.index.json", index)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
