"""Checkpoints of random weights in a family's layout, written to a folder or generated as they are read.

Imports numpy only, and safetensors where a folder is written.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np

from ..weights.checkpoint import SINGLE, HFCheckpoint
from ..weights.files import Files
from .families import family_of
from .families.family import Names, Source

DEFAULT = Names()
BLOCK = 1 << 20
"""A block of random numbers that large tensors repeat: the time to compute does not depend on the values."""


def is_table(name: str, names: Names) -> bool:
    """Return whether a tensor is a token embedding or an output head."""
    return any(word in name for word in names.of_embedding) or name == f"{names.head}.weight"


def random_tensor(
    name: str, shape: tuple[int, ...], offset: float, seed: int, names: Names = DEFAULT
) -> np.ndarray:
    """Return float32: matrices keep their input's variance, norms stay near the one that changes nothing.

    Args:
        offset: what the family's norms add to their weight.
        seed: of all tensors; each tensor's stream depends on its name too.
        names: the family's names of modules.
    """
    generator = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = generator.standard_normal(shape, dtype=np.float32)
    if is_table(name, names) or "position_embedding" in name:
        return values
    if len(shape) > 1:
        return values * deviation(shape)
    if name.endswith(".bias"):
        return values * np.float32(0.1)
    neutral = 1.0 - offset if "norm.weight" in name else 1.0
    return np.float32(0.1) * values + np.float32(neutral)


def deviation(shape: tuple[int, ...]) -> np.float32:
    """Return the deviation of a matrix that keeps its input's variance; of several matrices in one tensor,
    such as all experts', the deviation of one."""
    inputs = shape[-1] if len(shape) == 3 else math.prod(shape[1:])
    return np.float32(inputs**-0.5)


def write_text_model(folder: Path, config: Mapping[str, Any], seed: int = 0) -> None:
    """Write config.json and random text weights in float32; no tokenizer, and no image encoder.

    Args:
        folder: an existing folder.
    """
    from safetensors.numpy import save_file

    family = family_of(config)
    architecture = family.architecture(config)
    prefix = "model.language_model." if "vision_config" in config else family.prefixes[-1]
    offset = family.norm_offset(architecture)
    tensors = {}
    for parameter in family.parameters(architecture):
        for source in parameter.sources:
            name = source.full_name(prefix)
            tensors[name] = random_tensor(name, source.shape, offset, seed, family.names)
            if is_table(name, family.names):
                tensors[name] *= np.float32(0.5)
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(config) | {"dtype": "float32"}), encoding="utf-8")


@dataclass(frozen=True)
class RandomCheckpoint(HFCheckpoint):
    """A checkpoint of any size whose weights are generated as they are read, and never stored."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> RandomCheckpoint:
        family = family_of(config)
        nowhere = cast(Files, None)
        prefix = family.prefixes[-1]
        return cls(nowhere, config, family, family.architecture(config), prefix, {}, {}, None, ())

    @property
    def name(self) -> str:
        return "random weights"

    def verify(self) -> None:
        """Do nothing: no tensor can be missing."""

    def unused(self) -> list[str]:
        return []

    def release(self, name: str, forget: bool = False) -> None:
        """Do nothing: there is no memory to release."""

    def read_rows(self, source: Source, start: int, stop: int) -> np.ndarray:
        name, shape = source.full_name(self.prefix), (stop - start, *source.reshape[1:])
        if len(source.shape) < 2:
            offset = self.family.norm_offset(self.architecture)
            values = random_tensor(name, source.shape, offset, 0, self.family.names)
            return values.reshape(source.reshape)[start:stop]
        embedding = any(word in name for word in self.family.names.of_embedding)
        scale = np.float32(0.02) if embedding else deviation(source.shape)
        return np.resize(_block(float(scale)), shape)


@cache
def _block(scale: float) -> np.ndarray:
    """bfloat16[BLOCK]."""
    values = np.random.default_rng(0).standard_normal(BLOCK, dtype=np.float32) * np.float32(scale)
    return values.astype(ml_dtypes.bfloat16)
