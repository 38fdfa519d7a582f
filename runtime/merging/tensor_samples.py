"""Compare samples of a merged folder's tensors with an independent computation.

The expected value of each trained tensor comes from the run's own arrays, element by element, in float64.
This uses nothing of the merge: neither its arithmetic nor its conversion of the model's arrays to Hugging
Face's matrices. Each element of a merged tensor is looked up in the model's array by its index, as the base
is loaded. The change by training is the product of the run's arrays over the whole rank axis.

A tensor that training replaced has the replaced values, and of a quantized tensor the represented numbers are
compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import ml_dtypes
import numpy as np

from ..checkpoints.trained_weights import TrainedAdapters, TrainedWeights, embedding_of
from ..errors import UserError
from ..model.adapters import TOKEN_ROWS, Adapter, LoraSettings
from ..model.families.family import Parameter, Source
from ..progress import Progress
from ..weights.checkpoint import HFCheckpoint
from .merged_files import SCALE, UNUSABLE, MergedFiles, Rows, check_names, rows_of

SINGLE_ROUNDING = 2.0**-24
"""Largest relative error of one operation in float32."""


def places(source: Source, elements: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the places of a Hugging Face tensor's elements in the model's array: an index for each axis.

    Args:
        elements: numbers of the elements in the order of the tensor's bytes.
    """
    along = np.unravel_index(elements, source.reshape)
    return tuple(along[axis] for axis in source.transpose)


def scale_of(adapter: Adapter, settings: LoraSettings) -> float:
    """Return the factor of an adapter's B A: alpha / rank, or alpha / sqrt(rank) with rsLoRA."""
    rank = settings.rank_of(adapter.name)
    return settings.alpha_of(adapter.name) / (math.sqrt(rank) if settings.rslora else rank)


def last_place(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the distance between adjacent numbers of a type, at some float64 values."""
    info = ml_dtypes.finfo(dtype)
    exponent = np.where(values == 0, info.minexp, np.frexp(values)[1] - 1)
    return np.ldexp(1.0, np.maximum(exponent, info.minexp) - info.nmant)


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
    per_stratum = wanted // strata
    edges = np.linspace(0, length, strata + 1).astype(np.int64)
    starts = random.integers(edges[:-1], edges[1:] - per_stratum + 1)
    return (starts[:, None] + np.arange(per_stratum)).reshape(-1)


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
            values, unit, allowed = decoded(merged, name, rows, stored, exact)
            allowed = allowed + slack
        else:
            values, unit = stored.astype(np.float64), last_place(exact, stored.dtype)
            allowed = unit / 2 + slack
        error = np.abs(values - exact)
        wrong = ~(error <= allowed)
        if wrong.any():
            row, column = (int(index[0]) for index in np.nonzero(wrong))
            raise UserError(
                f"{merged.path(name)}: {name} is not what was trained: {np.count_nonzero(wrong):,} of "
                f"{wrong.size:,} compared elements are wrong, first [{rows[row]}, {column}]: "
                f"{values[row, column]:.6g} instead of {exact[row, column]:.6g}",
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
    out = dict(_replacements(base, trained))
    out |= {copy: out[name] for copy, name in base.copies.items() if name in out}
    if not isinstance(trained, TrainedAdapters):
        return out
    parameters = {p.path: p for p in base.family.parameters(base.architecture)}
    for adapter in trained.adapters:
        parameter = parameters[adapter.target.weight]
        if adapter.target.experts:
            for number, source in enumerate(parameter.sources):
                experts = ExpertProduct(adapter, parameter, number, trained)
                out[source.full_name(base.prefix)] = Expected(experts.value)
            continue
        (source,) = parameter.sources
        out[source.full_name(base.prefix)] = Expected(Product(adapter, source, trained).value)
    return out


def _replacements(
    base: HFCheckpoint, trained: TrainedAdapters | TrainedWeights
) -> Iterator[tuple[str, Expected]]:
    """Yield the full name and expected value of each tensor that training replaced, in whole or in rows."""
    for parameter in trained.parameters:
        numbers = trained.numbers if isinstance(trained, TrainedAdapters) else ()
        if parameter.path == TOKEN_ROWS:
            values = functools.partial(_with_rows, trained.read(TOKEN_ROWS).astype(np.float64), numbers)
            yield embedding_of(base).full_name(base.prefix), Expected(values, also=numbers)
            continue
        for index, source in enumerate(parameter.sources):
            values = functools.partial(_replaced, trained, parameter, index)
            yield source.full_name(base.prefix), Expected(values)


def _with_rows(
    replaced: np.ndarray, numbers: Sequence[int], rows: Rows, weight: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return rows of the embedding, of which training replaced those of `numbers`."""
    out = weight.copy()
    for number, row in zip(numbers, replaced, strict=True):
        out[rows == number] = row
    return out, 0.0


def _replaced(
    trained: TrainedAdapters | TrainedWeights, parameter: Parameter, index: int, rows: Rows, _: np.ndarray
) -> tuple[np.ndarray, float]:
    """Return rows of a tensor that training replaced; the base's rows do not matter."""
    array, source = trained.read(parameter.path)[parameter.place(index)], parameter.sources[index]
    width = math.prod(source.shape[1:])
    return array[places(source, rows[:, None] * width + np.arange(width))].astype(np.float64), 0.0


class Product:
    """The change that LoRA adds to one Hugging Face tensor.

    Args:
        adapter: the adapter of the weight.
        source: the Hugging Face tensor.
        trained: the run's arrays.
    """

    def __init__(self, adapter: Adapter, source: Source, trained: TrainedAdapters) -> None:
        self.source = source
        # [*contracted, rank], [rank, *rest] and, with DoRA, [*rest]
        self.a, self.b, *magnitude = trained.arrays[adapter.target.weight]
        self.magnitude = magnitude[0].reshape(-1).astype(np.float64)[:, None] if magnitude else None
        self.scale = scale_of(adapter, trained.settings)
        self.contracted = adapter.target.contract
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
        self.scale = scale_of(adapter, trained.settings)
        self.contracted = adapter.target.contract
        self.rest = [i for i in range(1, len(parameter.shape)) if i not in self.contracted]

    def sums(self, rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield, for each number of the rank axis, A's and B's part in each element of some rows, B scaled:
        float64[rows, elements of a row]."""
        width = math.prod(self.source.shape[1:])
        indices = iter(places(self.source, rows[:, None] * width + np.arange(width)))
        at = [next(indices) if isinstance(index, slice) else index for index in self.place]
        low, high = [at[axis] for axis in self.contracted], [at[axis] for axis in self.rest]
        for rank in range(self.a.shape[-1]):
            a = self.a[..., rank][(at[0], *low)].astype(np.float64)
            yield a, self.b[:, rank][(at[0], *high)].astype(np.float64) * self.scale

    def value(self, rows: Rows, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the value, see Expected.value."""
        change, lows, highs = (np.zeros_like(weight) for _ in range(3))
        for low, high in self.sums(rows):
            change += high * low
            lows += low**2
            highs += high**2
        bound = np.sqrt(lows) * np.sqrt(highs) + np.abs(weight)
        bound *= (self.a.shape[-1] + 4) * SINGLE_ROUNDING
        bound += float(np.finfo(np.float32).tiny)
        return weight + change, bound


def decoded(
    merged: MergedFiles, name: str, rows: Rows, stored: np.ndarray, exact: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what rows of a quantized tensor represent, the step of its quantization at each element, and the
    largest difference that the quantization may cause.

    Args:
        stored, exact: the rows in the tensor's own type, and their float64 values before quantization.
    """
    scale = merged.rows(name + SCALE, rows).astype(np.float64)
    integers = stored.dtype == np.int8
    unit = scale * (np.ones_like(exact) if integers else last_place(exact / scale, stored.dtype))
    # The encoder first divides by the scale in float32, which may give the other neighbor.
    return stored.astype(np.float64) * scale, unit, unit * (0.5 + 2.0**-8) + np.abs(exact) * 2.0**-20
