"""Compare a checkpoint's tensors with the names, shapes and types of its family and its config.json, and
decide whether its output head is its embedding, as transformers 5 does.

config.json may say that the head is the embedding (`tie_word_embeddings`) while the files hold both, as saves
of FSDP and DeepSpeed do. transformers ties the two if they hold the same values, and otherwise computes with
the head of the files. vLLM reads config.json alone. So a checkpoint whose head differs is read, and written,
with `tie_word_embeddings: false`.

Training checks a checkpoint's files with this module, the compiler a list of tensors. So it does not import
numpy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from ..model.families.family import LAYERS, TIE, Architecture, Family, Source, arrays, text_config
from .files import Files
from .headers import FLOATING, Tensor

CONFIG = "config.json"
LAYER = re.compile(rf"{LAYERS}\.(\d{{1,9}})\.")
QUANTIZATION = "quantization_config"
"""The key of config.json that describes how weights are stored quantized."""
ORIGINAL = "quantized checkpoints cannot be trained or merged; use the original one"
ONE_CHECKPOINT = f"{CONFIG} and the weights must be of one checkpoint"


class Stored(Protocol):
    """A tensor of a checkpoint: its file, its element type by safetensors' name, its shape."""

    @property
    def file(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Kind(Enum):
    """The kinds of faults of a tensor."""

    MISSING = "missing"
    SHAPE = "of another shape"
    TYPE = "no float"
    LAYER = "of a layer that the model does not have"


@dataclass(frozen=True)
class Fault:
    """A tensor that does not match.

    Attributes:
        file: the file that holds it, or None.
        text: a clause, beginning with its name.
        help: what to do; None if it depends on the files.
    """

    kind: Kind
    tensor: str
    file: str | None
    text: str
    help: str | None


def prefix_of(family: Family, tensors: Mapping[str, object]) -> str | None:
    """Return the prefix of a checkpoint's text tensors; None if there is no text embedding."""
    return next((prefix for prefix, name in embeddings(family) if name in tensors), None)


def embeddings(family: Family) -> list[tuple[str, str]]:
    """Return the names that the text embedding may have, each with its prefix."""
    names = family.names.of_embedding
    return [(prefix, f"{prefix}{name}.weight") for prefix in family.prefixes for name in names]


def heads_of(family: Family) -> tuple[str, ...]:
    """Return the names that an output head's weight can have."""
    return f"{family.names.head}.weight", f"language_model.{family.names.head}.weight"


def faults(
    family: Family,
    architecture: Architecture,
    config: Mapping[str, Any],
    tensors: Mapping[str, Stored],
    prefix: str,
) -> Iterator[Fault]:
    """Return all mismatches between the tensors and what the family expects from a config.json.

    Args:
        config: config.json; the clauses name its keys.
        tensors: all tensors of the checkpoint, by their full names.
        prefix: prefix of its text tensors, from `prefix_of`.
    """
    used = set()
    for parameter in family.parameters(architecture):
        for source in parameter.sources:
            used.add(source.full_name(prefix))
            fault = fault_of(source, prefix, tensors)
            if fault is not None:
                yield fault
    layers = architecture.num_layers
    last = layers + family.further_layers(text_config(config)) - 1
    for name, tensor in tensors.items():
        layer = LAYER.match(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if layer is not None and int(layer[1]) > last:
            yield Fault(
                Kind.LAYER,
                name,
                tensor.file,
                f"{name} is of layer {layer[1]}, and {CONFIG} has num_hidden_layers {layers}, "
                f"which ends at layer {layers - 1}",
                ONE_CHECKPOINT,
            )


def fault_of(source: Source, prefix: str, tensors: Mapping[str, Stored]) -> Fault | None:
    """Return the fault of one source's tensor, or None."""
    name = source.full_name(prefix)
    tensor = tensors.get(name)
    if tensor is None:
        text = f"{name} is missing; {CONFIG} promises it with shape {list(source.shape)}"
        return Fault(Kind.MISSING, name, None, text, None)
    if tensor.shape != source.shape:
        text = f"{name} has shape {list(tensor.shape)}, expected {list(source.shape)} from {CONFIG}"
        return Fault(Kind.SHAPE, name, tensor.file, text, ONE_CHECKPOINT)
    if tensor.dtype not in FLOATING:
        text = f"{name} has type {tensor.dtype}, which is not a float type"
        return Fault(Kind.TYPE, name, tensor.file, text, ORIGINAL)
    return None


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
