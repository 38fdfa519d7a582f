"""What each trained tensor has to be: the run's own arrays, looked up element by element, in float64.

Nothing of the merge is used here: neither its arithmetic, nor its way from Tunix's arrays to Hugging Face's
matrices. Each element of a merged tensor is looked up in Tunix's array by its index, as the base is loaded;
what training added to it is the product of the run's arrays over their whole rank axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from runtime.adapters import Adapter, LoraSettings
from runtime.checkpoint import BaseCheckpoint
from runtime.export.merged_files import Rows
from runtime.families.base import Parameter, Source
from runtime.full import TrainedWeights
from runtime.trained import TrainedAdapters

SINGLE_ROUNDING = 2.0**-24
"""Largest relative error of one operation in float32."""


@dataclass(frozen=True)
class Expected:
    """What training made of a tensor.

    Attributes:
        value: (rows, the base's rows) -> the float64 value, and how far float32 arithmetic may be from it;
            all of [rows, elements of a row].
        change: rows -> what training added to them, None where it replaced them.
    """

    value: Callable[[Rows, np.ndarray], tuple[np.ndarray, np.ndarray | float]]
    change: Callable[[Rows], np.ndarray] | None = None


def expectations(base: BaseCheckpoint, trained: TrainedAdapters | TrainedWeights) -> dict[str, Expected]:
    """What training made of each tensor that it changed, by its full name, in the order of parameters."""
    out: dict[str, Expected] = {}
    if isinstance(trained, TrainedWeights):
        for parameter in trained.parameters:
            for index, source in enumerate(parameter.sources):
                out[source.full_name(base.prefix)] = _replaced(trained, parameter, index)
        return out
    parameters = {p.path: p for p in base.family.parameters(base.architecture)}
    for adapter in trained.adapters:
        for part in adapter.projections:
            source = parameters[adapter.site.weight].sources[part.slot if adapter.site.fused else 0]
            product = Product(adapter, source, part.slot, trained)
            out[source.full_name(base.prefix)] = Expected(product.value, product.change)
    return out


def places(source: Source, elements: np.ndarray) -> tuple[np.ndarray, ...]:
    """Where elements of a Hugging Face tensor are in Tunix's array: an index for each of its axes.

    Args:
        elements: their numbers in the order of the tensor's bytes.
    """
    along = np.unravel_index(elements, source.reshape)
    return tuple(along[axis] for axis in source.transpose)


class Product:
    """What LoRA adds to one Hugging Face tensor.

    Args:
        adapter: of the weight in Tunix.
        source: the tensor.
        slot: its place on the first axis of a fused weight.
        trained: the run's arrays.
    """

    def __init__(self, adapter: Adapter, source: Source, slot: int, trained: TrainedAdapters) -> None:
        self.source = source
        self.a, self.b = trained.arrays[adapter.site.weight]  # [*contracted, rank], [rank, *rest]
        if adapter.site.fused:
            self.b = self.b[:, slot]
        self.scale = rank_scales(adapter, trained.settings)
        # The axes of the tensor's own part of the weight, of which a fused one has one more.
        shift = int(adapter.site.fused)
        self.contracted = [axis - shift for axis in adapter.site.contract]
        self.rest = [axis for axis in range(len(source.transpose)) if axis not in self.contracted]

    def factors(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """A's and B's part in some rows: float64 [rank, elements of a row], [rows, rank], B scaled."""
        columns = self.source.shape[1]
        across = places(self.source, rows[0] * columns + np.arange(columns))
        down = places(self.source, rows * columns)
        if any(np.ptp(down[axis]) for axis in self.contracted) or any(np.ptp(across[a]) for a in self.rest):
            raise AssertionError(f"{self.source.name}: a row is not one output feature")
        low = self.a[tuple(across[axis] for axis in self.contracted)]
        high = np.moveaxis(self.b, 0, -1)[tuple(down[axis] for axis in self.rest)]
        return low.T.astype(np.float64), high.astype(np.float64) * self.scale

    def change(self, rows: Rows) -> np.ndarray:
        """What is added to some rows."""
        low, high = self.factors(rows)
        return high @ low

    def value(self, rows: Rows, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """See Expected.value."""
        low, high = self.factors(rows)
        # By Cauchy and Schwarz, no sum of the products' sizes is larger than the product of the lengths.
        bound = np.linalg.norm(high, axis=1)[:, None] * np.linalg.norm(low, axis=0)
        bound += np.abs(weight)
        bound *= (len(low) + 4) * SINGLE_ROUNDING
        bound += float(np.finfo(np.float32).tiny)
        out = high @ low
        out += weight
        return out, bound


def rank_scales(adapter: Adapter, settings: LoraSettings) -> np.ndarray:
    """What each entry of an adapter's rank axis is multiplied by: alpha / rank of the projection that it
    belongs to, or alpha / sqrt(rank) with rsLoRA. float64[rank]."""
    out = np.zeros(adapter.rank)
    for part in adapter.projections:
        rank = settings.rank_of(part.name)
        out[part.block] = settings.alpha_of(part.name) / (math.sqrt(rank) if settings.rslora else rank)
    return out


def _replaced(trained: TrainedWeights, parameter: Parameter, index: int) -> Expected:
    source = parameter.sources[index]

    def value(rows: Rows, weight: np.ndarray) -> tuple[np.ndarray, float]:
        array = trained.read(parameter.path)
        if len(parameter.sources) > 1:
            array = array[index]
        width = math.prod(source.shape[1:])
        return array[places(source, rows[:, None] * width + np.arange(width))].astype(np.float64), 0.0

    return Expected(value)
