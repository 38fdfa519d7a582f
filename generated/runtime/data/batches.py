"""Rows to micro-batches.

A micro-batch is a dict of arrays, B rows of T tokens, padded on the right:
    tokens int32[B, T], positions int32[B, T] (from 0 in each sample),
    segment_ids int32[B, T] (1, 2, ... for the samples of a row, 0 for padding),
    loss_mask bool[B, T] (True: this token is a target),
    norm float32[] (what the summed loss of the targets is divided by),
    index int32[] (which micro-batch of the run this is).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from runtime.data.packing import pack
from runtime.data.samples import Sample

Batch = dict[str, np.ndarray]
Row = tuple[int, ...]
"""Indices of the samples that lie in a row, in order."""


@dataclass(frozen=True)
class Shape:
    """Of a micro-batch: `rows` of `length` tokens, filled up with the token `pad`."""

    rows: int
    length: int
    pad: int


def fill(samples: Sequence[Sample], rows: Sequence[Row], shape: Shape, norm: float, index: int) -> Batch:
    """One micro-batch, from at most `shape.rows` rows."""
    tokens = np.full((shape.rows, shape.length), shape.pad, dtype=np.int32)
    positions = np.zeros_like(tokens)
    segment_ids = np.zeros_like(tokens)
    loss_mask = np.zeros(tokens.shape, dtype=bool)
    for r, row in enumerate(rows):
        start = 0
        for segment, i in enumerate(row, 1):
            end = start + len(samples[i].tokens)
            tokens[r, start:end] = samples[i].tokens
            positions[r, start:end] = np.arange(end - start)
            segment_ids[r, start:end] = segment
            loss_mask[r, start:end] = samples[i].targets
            start = end
    return {
        "tokens": tokens,
        "positions": positions,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "norm": np.asarray(norm, dtype=np.float32),
        "index": np.asarray(index, dtype=np.int32),
    }


class Rows:
    """The rows of each epoch.

    Args:
        samples: at least one.
        length: tokens of a row.
        packing: whether several samples share one.
        seed: with the epoch, decides which equally long samples meet in a row; None keeps the order.
    """

    def __init__(self, samples: Sequence[Sample], length: int, packing: bool, seed: int | None) -> None:
        self._lengths = [len(sample.tokens) for sample in samples]
        self._length = length
        self._packing = packing
        self._seed = seed
        self._cached = lru_cache(maxsize=2)(self._of)

    def of(self, epoch: int) -> list[Row]:
        """The rows of an epoch; their number is the same in all of them."""
        return self._cached(epoch if self._packing else 0)

    def _of(self, epoch: int) -> list[Row]:
        if not self._packing:
            return [(i,) for i in range(len(self._lengths))]
        order = np.arange(len(self._lengths))
        if self._seed is not None:
            order = np.random.default_rng([self._seed, epoch]).permutation(order)
        return pack(self._lengths, self._length, order.tolist())


class Schedule:
    """Which rows are in which micro-batch of a run, by number, without building those before it.

    An epoch visits each row once, in its own order, in windows of `accumulation` micro-batches; the last
    window of an epoch holds what is left, and is filled up with empty rows.

    Args:
        samples, rows: of the run.
        shape: of a micro-batch.
        accumulation: micro-batches of an optimizer step.
        by_tokens: the mean is over the targets of the window; otherwise over the means of its micro-batches.
        seed: of the order; epoch e is shuffled with seed + e; None keeps the order.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        rows: Rows,
        shape: Shape,
        accumulation: int,
        by_tokens: bool,
        seed: int | None,
    ) -> None:
        self._samples = samples
        self._targets = [int(sample.targets.sum()) for sample in samples]
        self._rows = rows
        self._shape = shape
        self._accumulation = accumulation
        self._by_tokens = by_tokens
        self._seed = seed
        self._window = shape.rows * accumulation
        self.steps_per_epoch = math.ceil(len(rows.of(0)) / self._window)
        self._order = lru_cache(maxsize=2)(self._windows)
        self._parts = lru_cache(maxsize=2)(self._micro_batches)

    def micro_batch(self, index: int) -> Batch:
        """Micro-batch number `index` of the run, from 0."""
        step, part = divmod(index, self._accumulation)
        parts = self._parts(step)
        return fill(self._samples, parts[part], self._shape, self._norm(parts, part), index)

    def _micro_batches(self, step: int) -> list[list[Row]]:
        """The rows of each micro-batch of an optimizer step."""
        epoch, window = divmod(step, self.steps_per_epoch)
        rows = self._rows.of(epoch)
        chosen = [rows[i] for i in self._order(epoch)[window]]
        return [chosen[i : i + self._shape.rows] for i in range(0, self._window, self._shape.rows)]

    def _windows(self, epoch: int) -> Any:
        """The row numbers of each step of an epoch."""
        import grain

        rows = grain.MapDataset.range(len(self._rows.of(epoch)))
        if self._seed is not None:
            rows = rows.shuffle(seed=(self._seed + epoch) % 2**32)
        return rows.batch(self._window, batch_fn=list)

    def _norm(self, parts: Sequence[Sequence[Row]], part: int) -> float:
        counts = [sum(self._targets[i] for row in rows for i in row) for rows in parts]
        if self._by_tokens:
            return sum(counts) / self._accumulation
        if not counts[part]:
            return 1.0  # an empty micro-batch: its summed loss is 0
        return counts[part] * sum(count > 0 for count in counts) / self._accumulation


def iterate(micro_batch: Callable[[int], Batch], start: int, stop: int) -> Any:
    """Micro-batches start ... stop - 1 as a grain dataset, built ahead in one thread."""
    import grain

    indices = grain.MapDataset.range(start, stop)
    return indices.map(micro_batch).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))


def evaluation_batches(samples: Sequence[Sample], rows: Sequence[Row], shape: Shape) -> list[Batch]:
    """Every row once, in order.

    The norm is such that the mean over the batches of summed loss / norm is the loss of a target, whatever
    the batch that it is in.
    """
    parts = [rows[i : i + shape.rows] for i in range(0, len(rows), shape.rows)]
    targets = sum(int(sample.targets.sum()) for sample in samples)
    return [fill(samples, part, shape, targets / len(parts), i) for i, part in enumerate(parts)]
