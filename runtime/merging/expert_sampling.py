"""The exact change that LoRA adds to the tensors of experts; sampling.py has that of other tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..checkpoints.adapter_reader import TrainedAdapters
from ..model.adapters import Adapter
from ..model.families.base import Parameter
from .exactly import SINGLE_ROUNDING, places, rank_scales
from .merged_files import Rows


class ExpertProduct:
    """The change that LoRA adds to a tensor of one expert, or of all experts.

    Args:
        adapter: the adapter of the weight that holds the experts.
        parameter: that weight.
        number: number of the tensor among those that form the weight.
        trained: the run's arrays.
    """

    def __init__(self, adapter: Adapter, parameter: Parameter, number: int, trained: TrainedAdapters) -> None:
        self.source, self.place = parameter.sources[number], parameter.place(number)
        self.a, self.b = trained.arrays[parameter.path]  # [experts, *in, rank], [experts, rank, *out]
        self.scale = rank_scales(adapter, trained.settings)
        self.contracted = adapter.target.contract
        self.rest = [i for i in range(1, len(parameter.shape)) if i not in self.contracted]

    def sums(self, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, for each number of the rank axis, A's and B's part in each element of some rows, B scaled:
        float64[rows, elements of a row]."""
        width = math.prod(self.source.shape[1:])
        found = iter(places(self.source, rows[:, None] * width + np.arange(width)))
        at = [next(found) if isinstance(index, slice) else index for index in self.place]
        low, high = [at[axis] for axis in self.contracted], [at[axis] for axis in self.rest]
        for rank, scale in enumerate(self.scale):
            a = self.a[..., rank][(at[0], *low)].astype(np.float64)
            yield a, self.b[:, rank][(at[0], *high)].astype(np.float64) * scale

    def value(self, rows: Rows, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the value, see Expected.value."""
        change, lows, highs = (np.zeros_like(weight) for _ in range(3))
        for low, high in self.sums(rows):
            change += high * low
            lows += low**2
            highs += high**2
        bound = np.sqrt(lows) * np.sqrt(highs) + np.abs(weight)
        bound *= (len(self.scale) + 4) * SINGLE_ROUNDING
        bound += float(np.finfo(np.float32).tiny)
        return weight + change, bound
