"""Decide whether a checkpoint's output head is its embedding, as transformers 5 does.

config.json may say that the head is the embedding (`tie_word_embeddings`) while the files hold both, as saves
of FSDP and DeepSpeed do. transformers ties the two if they hold the same values, and otherwise computes with
the head of the files. vLLM reads config.json alone. So a checkpoint whose head differs is read, and written,
with `tie_word_embeddings: false`. The compiler also uses this, so it does not import numpy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model.families.base import TIE, Architecture, Family, arrays
from .agreement import Stored, embeddings, heads_of
from .checkpoint_files import Files
from .headers import Tensor

BLOCK = 1 << 24
"""Bytes of each tensor that are compared at a time."""
KEYS = (TIE, "tie_embedding")
"""The keys of config.json that say it; LFM 2 has the second."""


def spare_head(
    family: Family, architecture: Architecture, tensors: Mapping[str, Stored], prefix: str
) -> tuple[str, str] | None:
    """Return the names of a head and of the embedding if a tied model's files hold both, else None."""
    head = next((name for name in heads_of(family) if name in tensors), None)
    if head is None:
        return None
    if any(
        source.full_name(prefix) == head for array in arrays(family, architecture) for source in array.sources
    ):
        return None
    return head, next(name for start, name in embeddings(family) if start == prefix and name in tensors)


def same_values(files: Files, first: Tensor, second: Tensor) -> bool:
    """Return whether two tensors hold the same bytes. Tensors of two types count as different.

    Raises:
        UserError: when they cannot be read.
    """
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        return False
    for start in range(0, first.size, BLOCK):
        end = min(start + BLOCK, first.size)
        if bytes(first.bytes_of(files.view, start, end)) != bytes(second.bytes_of(files.view, start, end)):
            return False
        for tensor in (first, second):
            files.release(tensor.file, tensor.start + start, tensor.start + end)
    return True


def untied(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config.json that says everywhere that the head is not the embedding."""
    changed = {**config, TIE: False, **{key: False for key in KEYS if key in config}}
    if isinstance(nested := config.get("text_config"), Mapping):
        changed["text_config"] = untied(nested)
    return changed
