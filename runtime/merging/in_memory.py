"""A checkpoint that applies a merge's changes while its weights are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np

from ..model.families.base import Source
from ..weights.checkpoint import HFCheckpoint
from .arithmetic import Change, changed_blocks


@dataclass(frozen=True)
class InMemory(HFCheckpoint):
    """A checkpoint that changes weights when they are read, as a merge to `dtype` changes them."""

    changes: Mapping[str, Change] | None = None
    dtype: str = "float32"

    def read(self, name: str) -> np.ndarray:
        weight = super().read(name)
        change = (self.changes or {}).get(name)
        if change is None:
            return weight
        return np.concatenate(list(changed_blocks(weight, change, np.dtype(self.dtype))))

    def read_rows(self, source: Source, start: int, stop: int) -> np.ndarray:
        return self.read(source.full_name(self.prefix)).reshape(source.reshape)[start:stop]


def in_memory(base: HFCheckpoint, changes: Mapping[str, Change], dtype: str) -> InMemory:
    """Return `base` with changes, by full tensor names, applied in memory."""
    values = {field.name: getattr(base, field.name) for field in fields(HFCheckpoint)}
    return InMemory(**values, changes=changes, dtype=dtype)
