"""Compare samples of a merged folder's tensors with an independent computation.

The expected value of each trained tensor comes from the run's own arrays, element by element, in float64.
This uses nothing of the merge: neither its arithmetic nor its conversion of Tunix's arrays to Hugging Face's
matrices. Each element of a merged tensor is looked up in Tunix's array by its index, as the base is loaded.
The change by training is the product of the run's arrays over the whole rank axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..checkpoints.adapter_reader import TrainedAdapters
from ..errors import UserError
from ..model.adapters import Adapter
from ..model.families.base import Source
from ..progress import Progress
from ..weights.checkpoint import HFCheckpoint
from .exactly import SINGLE_ROUNDING, last_place, places, rank_scales
from .merged_files import UNUSABLE, MergedFiles, Rows, check_names, rows_of

if TYPE_CHECKING:
    from ..checkpoints.full import TrainedWeights

WHOLE = 1 << 21
"""The most elements of a tensor that is compared whole; of a larger one only rows are compared."""
ROWS = 256
FEWEST_ROWS = 8
"""Rows that are compared of a large tensor: ROWS, or as many as have WHOLE elements, or FEWEST_ROWS."""
STRATA = 64
"""Number of equal parts of a large tensor; each gives some adjacent rows. With this many parts, a wrong block
of 1/32 of the tensor or more is always found."""
BLOCK_ELEMENTS = 1 << 20
"""Elements that are processed at a time; each takes about ten numbers of 8 bytes."""


@dataclass(frozen=True)
class Sampled:
    """What was compared, and the result.

    Attributes:
        trained: tensors that training changed, all compared.
        kept: unchanged tensors, all compared byte for byte.
        elements: number of compared elements of trained and of quantized tensors.
        largest: largest difference from the float64 value.
        share: the largest difference as a share of that element's tolerance.
        off: elements that are not the nearest number to the float64 value: float32 arithmetic causes some.
    """

    trained: int = 0
    kept: int = 0
    elements: int = 0
    largest: float = 0.0
    share: float = 0.0
    off: int = 0

    def with_elements(self, error: np.ndarray, nearest: np.ndarray, allowed: np.ndarray) -> Sampled:
        """Return the result with further elements: their differences, the largest differences that rounding
        causes, and the largest allowed differences."""
        return replace(
            self,
            elements=self.elements + error.size,
            largest=max(self.largest, float(error.max())),
            share=max(self.share, float((error / allowed).max())),
            off=self.off + int(np.count_nonzero(error > nearest)),
        )


def check_tensors(
    base: HFCheckpoint,
    trained: TrainedAdapters | TrainedWeights,
    folder: Path,
    dtype: str,
    seed: int = 0,
) -> Sampled:
    """Compare a merged folder's tensors with the base's, and with the tensors that training changed.

    The folder must hold every tensor of the base once, in its shape, and no other. A tensor is compared in
    all elements if it has at most WHOLE; otherwise in rows from all its parts. Untrained tensors must have
    the base's bytes. A merged element may differ from the float64 value by one rounding, and by the error of
    float32 arithmetic before it: (rank + 4) * 2^-24 of |W| + |a| |b|, with the lengths of the element's row
    of A and column of B. A quantized element may differ by half a step of its quantization.

    Args:
        dtype: type of the merged tensors.
        seed: seed for the choice of rows.

    Raises:
        UserError: naming the first wrong tensor.
    """
    expected = _expectations(base, trained)
    merged = MergedFiles(folder)
    check_names(base, set(expected), merged, dtype)
    random = np.random.default_rng(seed)
    kept = [name for name in base.tensors if name not in expected]
    result = Sampled(len(expected), len(kept))
    with Progress("comparing tensors", len(expected) + len(kept)) as progress:
        for name in expected:
            result = _check_values(base, merged, name, expected[name], random, result)
            progress.advance(1)
        for name in kept:
            if merged.quantized(name):
                result = _check_values(base, merged, name, None, random, result)
            else:
                _check_bytes(base, merged, name, random)
            progress.advance(1)
    return result


def sample_rows(shape: tuple[int, ...], random: np.random.Generator) -> Rows:
    """Choose all rows of a small tensor; of a large one, adjacent rows of each of its STRATA parts."""
    if not shape:
        return np.zeros(1, np.int64)
    length, width = shape[0], math.prod(shape[1:])
    if length * width <= WHOLE:
        return np.arange(length)
    wanted = min(length, max(FEWEST_ROWS, min(ROWS, WHOLE // width)))
    strata = min(STRATA, wanted)
    each = wanted // strata
    edges = np.linspace(0, length, strata + 1).astype(np.int64)
    starts = random.integers(edges[:-1], edges[1:] - each + 1)
    return (starts[:, None] + np.arange(each)).reshape(-1)


def sampled_blocks(shape: tuple[int, ...], random: np.random.Generator) -> list[Rows]:
    """Return the compared rows of a tensor, in blocks of at most BLOCK_ELEMENTS, or of one row."""
    if math.prod(shape) == 0:
        return []
    rows = sample_rows(shape, random)
    step = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    return [rows[start : start + step] for start in range(0, len(rows), step)]


def _check_bytes(base: HFCheckpoint, merged: MergedFiles, name: str, random: np.random.Generator) -> None:
    for rows in sampled_blocks(merged.tensors[name].shape, random):
        if merged.rows(name, rows).tobytes() != rows_of(base.tensors[name], base.store.view, rows).tobytes():
            raise UserError(
                f"{merged.path(name)}: {name} was not trained, and does not have the base's bytes", UNUSABLE
            )
    base.release(name)


def _check_values(
    base: HFCheckpoint,
    merged: MergedFiles,
    name: str,
    expected: Expected | None,
    random: np.random.Generator,
    result: Sampled,
) -> Sampled:
    """Compare a tensor with its float64 value, or with the base's if training did not change it; return
    `result` updated."""
    also = [np.array([row]) for row in (expected.also if expected else ())]
    for rows in [*sampled_blocks(merged.tensors[name].shape, random), *also]:
        weight = rows_of(base.tensors[name], base.store.view, rows).astype(np.float64)
        exact, slack = (weight, 0.0) if expected is None else expected.value(rows, weight)
        stored = merged.rows(name, rows)
        if not np.isfinite(stored.astype(np.float32)).all() and np.isfinite(exact).all():
            raise UserError(f"{merged.path(name)}: {name} holds values that are not finite", UNUSABLE)
        if merged.quantized(name):
            from .quantized_sampling import decoded

            found, unit, allowed = decoded(merged, name, rows, stored, exact)
            allowed = allowed + slack
        else:
            found, unit = stored.astype(np.float64), last_place(exact, stored.dtype)
            allowed = unit / 2 + slack
        error = np.abs(found - exact)
        wrong = ~(error <= allowed)
        if wrong.any():
            row, column = (int(index[0]) for index in np.nonzero(wrong))
            raise UserError(
                f"{merged.path(name)}: {name} is not what was trained: {np.count_nonzero(wrong):,} of "
                f"{wrong.size:,} compared elements are wrong, first [{rows[row]}, {column}]: "
                f"{found[row, column]:.6g} instead of {exact[row, column]:.6g}",
                UNUSABLE,
            )
        result = result.with_elements(error, unit / 2, allowed)
    base.release(name)
    return result


@dataclass(frozen=True)
class Expected:
    """The expected value of a tensor after training.

    Attributes:
        value: (rows, the base's rows) -> the float64 value, and the allowed error of float32 arithmetic;
            both [rows, elements of a row].
        also: rows that are compared in addition to sampled ones.
    """

    value: Callable[[Rows, np.ndarray], tuple[np.ndarray, np.ndarray | float]]
    also: tuple[int, ...] = ()


def _expectations(base: HFCheckpoint, trained: TrainedAdapters | TrainedWeights) -> dict[str, Expected]:
    """Return the expected value of each changed tensor, by its full name, in the order of parameters."""
    out: dict[str, Expected] = {}
    if trained.parameters:
        from .whole_sampling import whole_values

        numbers = trained.numbers if isinstance(trained, TrainedAdapters) else ()
        for name, value, also in whole_values(base, trained.parameters, trained.read, numbers):
            out[name] = Expected(value, also=also)
        out |= {copy: out[name] for copy, name in base.copies.items() if name in out}
    if not isinstance(trained, TrainedAdapters):
        return out
    parameters = {p.path: p for p in base.family.parameters(base.architecture)}
    for adapter in trained.adapters:
        if adapter.target.experts:
            from .expert_sampling import ExpertProduct

            parameter = parameters[adapter.target.weight]
            for number, source in enumerate(parameter.sources):
                experts = ExpertProduct(adapter, parameter, number, trained)
                out[source.full_name(base.prefix)] = Expected(experts.value)
            continue
        for part in adapter.projections:
            source = parameters[adapter.target.weight].sources[part.slot if adapter.target.fused else 0]
            product = Product(adapter, source, part.slot, trained)
            out[source.full_name(base.prefix)] = Expected(product.value)
    return out


class Product:
    """The change that LoRA adds to one Hugging Face tensor.

    Args:
        adapter: the adapter of the weight in Tunix.
        source: the Hugging Face tensor.
        slot: its place on the first axis of a fused weight.
        trained: the run's arrays.
    """

    def __init__(self, adapter: Adapter, source: Source, slot: int, trained: TrainedAdapters) -> None:
        self.source = source
        # [*contracted, rank], [rank, *rest] and, with DoRA, [*rest]
        self.a, self.b, *magnitude = trained.arrays[adapter.target.weight]
        if adapter.target.fused:
            self.b, magnitude = self.b[:, slot], [m[slot] for m in magnitude]
        self.magnitude = magnitude[0].reshape(-1).astype(np.float64)[:, None] if magnitude else None
        self.scale = rank_scales(adapter, trained.settings)
        # The axes of the tensor's own part of the weight; a fused weight has one more.
        shift = int(adapter.target.fused)
        self.contracted = [axis - shift for axis in adapter.target.contract]
        self.rest = [axis for axis in range(len(source.transpose)) if axis not in self.contracted]

    def factors(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Return A's and B's part in some rows: float64 [rank, elements of a row], [rows, rank], B scaled."""
        columns = self.source.shape[1]
        across = places(self.source, rows[0] * columns + np.arange(columns))
        down = places(self.source, rows * columns)
        if any(np.ptp(down[axis]) for axis in self.contracted) or any(np.ptp(across[a]) for a in self.rest):
            raise AssertionError(f"{self.source.name}: a row is not one output feature")
        low = self.a[tuple(across[axis] for axis in self.contracted)]
        high = np.moveaxis(self.b, 0, -1)[tuple(down[axis] for axis in self.rest)]
        return low.T.astype(np.float64), high.astype(np.float64) * self.scale

    def value(self, rows: Rows, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the value, see Expected.value."""
        low, high = self.factors(rows)
        # By Cauchy-Schwarz, no sum of the products' absolute values exceeds the product of the lengths.
        bound = np.linalg.norm(high, axis=1)[:, None] * np.linalg.norm(low, axis=0)
        bound += np.abs(weight)
        bound *= (len(low) + 4) * SINGLE_ROUNDING
        bound += float(np.finfo(np.float32).tiny)
        out = high @ low
        out += weight
        if self.magnitude is not None:
            by = self.magnitude[rows] / np.linalg.norm(out, axis=1, keepdims=True)
            out, bound = out * by, bound * by
            bound += np.abs(out) * (4 * math.sqrt(out.shape[1]) * SINGLE_ROUNDING)
        return out, bound
