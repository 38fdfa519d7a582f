"""Turn rows into micro-batches, of training and of evaluation.

A micro-batch is a dict of arrays, B rows of T tokens, padded on the right:
    tokens int32[B, T], positions int32[B, T] (from 0 in each sample),
    segment_ids int32[B, T] (1, 2, ... for the samples of a row, 0 for padding),
    loss_mask bool[B, T] (True: this token is a target),
    norm float32[] (the divisor of the summed loss of the targets),
    index int32[] (number of this micro-batch in the run);
    for data with pictures also the arrays of pixels.py;
    with a teacher's stored log-probabilities also the arrays of stored_teacher.py;
    for unpaired preferences also desirable float32[B]: 1 / n for a desirable answer, -1 / n for an
    undesirable one, 0 for an empty row. n is the average number of answers of that kind in the step's
    micro-batches (1 in an evaluation).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..settings import DataSettings, Source
from .epochs import Epochs, PackedRows, Room
from .pixels import Pixels
from .samples import Samples
from .stored_teacher import StoredPart

if TYPE_CHECKING:
    from ..model.sharding import Rows
    from .prompts import Prompts


Batch = dict[str, np.ndarray]

Row = tuple[int, ...]
"""Indices of the groups of samples in a row, in order; without groups, indices of samples."""


@dataclass(frozen=True)
class BatchShape:
    """The shape of a micro-batch: `rows` rows of `length` tokens, padded with the token `pad`; of data with
    pictures what makes their arrays, and of samples with a teacher's stored log-probabilities these."""

    rows: int
    length: int
    pad: int
    pixels: Pixels | None = None
    teacher: StoredPart | None = None


@dataclass(frozen=True)
class TrainingData:
    """The data that a training loop reads.

    Attributes:
        batches: micro-batches, beginning with those of a given optimizer step.
        numbers: further metrics of a step whose micro-batches were read, on this host, or None.
        evaluation: the evaluation micro-batches; empty for no evaluation.
        state: the data's state after an optimizer step, as JSON values; it is saved with the step.
        origins: the source rows of a micro-batch, by its number; None if they are not known.
        tokens: the number of real tokens of a micro-batch, by its number; None counts them in `batches`.
        rows: the rows of each batch that this process's devices hold; None for all.
        eval_parts: the evaluation batches of each source, if there are several sources.
        prompts: the prompts that are answered at each evaluation, or None.
        evaluate: measures the current weights after a step without evaluation batches, or None.
    """

    batches: Callable[[int], Iterable[Batch]]
    evaluation: Sequence[Batch] = ()
    state: Callable[[int], Mapping[str, Any]] = lambda step: {}
    origins: Callable[[int], Sequence[str]] | None = None
    tokens: Callable[[int], int] | None = None
    rows: Rows | None = None
    eval_parts: Sequence[EvalPart] = ()
    prompts: Prompts | None = None
    numbers: Callable[[int], Mapping[str, float]] | None = None
    evaluate: Callable[[int], Mapping[str, float]] | None = None

    @property
    def evaluates(self) -> bool:
        """Return whether something is measured or written at evaluations."""
        return bool(self.evaluation) or self.evaluate is not None or self.prompts is not None


def fill(samples: Samples, rows: Sequence[Row], shape: BatchShape, norm: float, index: int) -> Batch:
    """Build a micro-batch from at most `shape.rows` rows; each sample of a group takes a row of its own."""
    if samples.group > 1:
        rows = [(sample,) for row in rows for group in row for sample in samples.members(group)]
    tokens = np.full((shape.rows * samples.group, shape.length), shape.pad, dtype=np.int32)
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
    batch = {
        "tokens": tokens,
        "positions": positions,
        "segment_ids": segment_ids,
        "loss_mask": loss_mask,
        "norm": np.asarray(norm, dtype=np.float32),
        "index": np.asarray(index, dtype=np.int32),
    }
    if shape.pixels is not None:
        batch |= shape.pixels.arrays(samples, rows, tokens)
    if shape.teacher is not None:
        batch |= shape.teacher.arrays(samples, rows, tokens)
    if len(samples.liked):
        sides = [(1 if samples.liked[row[0]] else -1) if row else 0 for row in rows]
        batch["desirable"] = np.array(sides + [0] * (shape.rows - len(rows)), np.float32)
    return batch


@dataclass(frozen=True)
class Step:
    """The rows of an optimizer step.

    Attributes:
        samples: the samples that its rows number.
        rows: the rows of all its micro-batches, in order.
    """

    samples: Samples
    rows: Sequence[Row]


@dataclass(frozen=True)
class Batching:
    """How the rows of a run become micro-batches.

    Attributes:
        shape: of a micro-batch.
        accumulation: micro-batches of an optimizer step.
        by_tokens: the mean is over the targets of the step (or over its groups, if groups are compared);
            otherwise over the means of its micro-batches.
    """

    shape: BatchShape
    accumulation: int
    by_tokens: bool


class Schedule(ABC):
    """Decide which rows are in which micro-batch of a run, by number.

    Args:
        group: number of samples that are compared with each other; 1 if none are.

    Attributes:
        steps_per_epoch: optimizer steps of one pass over the data; None if its length is not known.
    """

    steps_per_epoch: int | None = None

    def __init__(self, batching: Batching, group: int) -> None:
        self._shape = batching.shape
        self._accumulation = batching.accumulation
        self._by_tokens = batching.by_tokens
        self._group = group
        self._window = batching.shape.rows * batching.accumulation
        self._step = lru_cache(maxsize=2)(self._step_of)

    @abstractmethod
    def _step_of(self, step: int) -> Step:
        """Return the rows of an optimizer step."""

    def step(self, number: int) -> Step:
        """Return the rows of optimizer step `number`, from 0."""
        return self._step(number)

    @property
    def rows(self) -> int:
        """Return the number of rows of a micro-batch; each compared sample has a row of its own."""
        return self._shape.rows * self._group

    @property
    def rows_per_step(self) -> int:
        """Return the number of rows of an optimizer step, over all its micro-batches."""
        return self._window

    def state(self, step: int) -> dict[str, Any]:
        """Return the data's position after a step, as far as the number of rows does not give it."""
        return {}

    def close(self) -> None:
        """End reading ahead."""
        self._step.cache_clear()

    def micro_batch(
        self, index: int, rows: Sequence[int] | None = None, instead: Step | None = None
    ) -> Batch:
        """Build micro-batch number `index` of the run, from 0.

        Args:
            rows: which of its rows, ascending; compared samples are adjacent. None for all.
            instead: rows for its optimizer step that replace the step's own.
        """
        step, part = self._part(index, instead)
        chosen: Sequence[Row] = part
        shape, group = self._shape, self._group
        if rows is not None:
            places = [row // group for row in rows[::group]]
            chosen = [part[place] if place < len(part) else () for place in places]
            shape = replace(shape, rows=len(places))
        batch = fill(step.samples, chosen, shape, self._norm(step, part), index)
        if "desirable" in batch:
            liked = step.samples.liked[[i for row in step.rows for i in row]]
            disliked, desirable = np.bincount(liked, minlength=2) / self._accumulation
            sides = batch["desirable"]
            batch["desirable"] = sides / np.where(sides > 0, desirable, disliked or 1).astype(np.float32)
        return batch

    def tokens_of(self, index: int, instead: Step | None = None) -> int:
        """Return the number of real tokens of a micro-batch, over all its rows; `instead` as for
        `micro_batch`."""
        samples, members = self._samples_of(index, instead)
        lengths = samples.lengths
        return sum(int(lengths[sample]) for sample in members)

    def origins(self, index: int) -> list[str]:
        """Return the origins of a micro-batch's samples, row by row."""
        samples, members = self._samples_of(index)
        return [samples.origin(sample) for sample in members]

    def _samples_of(self, index: int, instead: Step | None = None) -> tuple[Samples, list[int]]:
        step, part = self._part(index, instead)
        return step.samples, [
            sample for row in part for group in row for sample in step.samples.members(group)
        ]

    def _part(self, index: int, instead: Step | None = None) -> tuple[Step, Sequence[Row]]:
        """Return the optimizer step of a micro-batch, and the micro-batch's rows."""
        number, part = divmod(index, self._accumulation)
        step, size = instead or self._step(number), self._shape.rows
        return step, step.rows[part * size : (part + 1) * size]

    def _norm(self, step: Step, part: Sequence[Row]) -> float:
        def count(rows: Sequence[Row]) -> int:
            return sum(int(step.samples.weights[i]) for row in rows for i in row)

        if self._by_tokens:
            return count(step.rows) / self._accumulation
        if not count(part):
            return 1.0  # an empty micro-batch: its summed loss is 0
        parts = chunked(step.rows, self._shape.rows)
        return count(part) * sum(count(rows) > 0 for rows in parts) / self._accumulation


class BatchSchedule(Schedule):
    """The micro-batches of epochs; any of them can be built without those before it.

    An epoch visits each row once, in its own order, in windows of `accumulation` micro-batches; the last
    window of an epoch holds what is left, and is filled up with empty rows.

    Args:
        samples, epochs: of the run.
        seed: of the order; epoch e is shuffled with seed + e. None keeps the order of the samples.
        by_length: whether an epoch runs from its shortest rows to its longest; equally long rows keep the
            order.
    """

    def __init__(
        self,
        samples: Samples,
        epochs: Epochs,
        batching: Batching,
        seed: int | None,
        by_length: bool = False,
    ) -> None:
        super().__init__(batching, samples.group)
        self._by_length = by_length
        self._samples = samples
        self._epochs = epochs
        self._seed = seed
        self.steps_per_epoch: int = math.ceil(len(epochs.of(0)) / self._window)
        self._order = lru_cache(maxsize=2)(self._windows)

    def drawn(self, steps: int) -> np.ndarray:
        """Return the groups of samples of the first steps, of at most one epoch."""
        rows, windows = self._epochs.of(0), self._order(0)
        if steps >= len(windows):
            return rows.samples
        chosen = [i for step in range(steps) for i in windows[step]]
        return np.asarray([group for i in chosen for group in rows[i]], np.int64)

    def _step_of(self, step: int) -> Step:
        epoch, window = divmod(step, self.steps_per_epoch)
        rows = self._epochs.of(epoch)
        return Step(self._samples, [rows[i] for i in self._order(epoch)[window]])

    def _windows(self, epoch: int) -> Any:
        import grain

        rows = grain.MapDataset.range(len(self._epochs.of(epoch)))
        if self._seed is not None:
            rows = rows.shuffle(seed=(self._seed + epoch) % 2**32)
        if self._by_length:
            lengths, packed = self._samples.group_lengths, self._epochs.of(epoch)
            rows = sorted(rows, key=lambda row: int(lengths[list(packed[row])].sum()))
            return [rows[i : i + self._window] for i in range(0, len(rows), self._window)]
        return rows.batch(self._window, batch_fn=list)


def only(batch: Batch, rows: Sequence[int]) -> Batch:
    """Return some rows of a micro-batch, and all entries that are not per row."""
    return {name: value[list(rows)] if value.ndim else value for name, value in batch.items()}


def chunked(rows: Sequence[Row], size: int) -> Iterator[list[Row]]:
    for start in range(0, len(rows), size):
        yield [rows[i] for i in range(start, min(start + size, len(rows)))]


@dataclass(frozen=True)
class EvalPart:
    """The evaluation batches of one source.

    Attributes:
        name: a unique name of the source.
        batches: numbers of the source's batches among the evaluation batches.
        factor: multiply the sum of their losses by this to get the source's own mean.
    """

    name: str
    batches: slice
    factor: float


def eval_losses(losses: Sequence[float], parts: Sequence[EvalPart]) -> dict[str, float]:
    """Return the mean loss of all targets as `loss`, and the mean of each part under its name.

    Args:
        losses: the loss of each evaluation batch.
    """
    batch_losses = np.asarray(losses, np.float64)
    of_parts = {part.name: float(batch_losses[part.batches].sum()) * part.factor for part in parts}
    return {"loss": float(batch_losses.mean()), **of_parts}


def eval_line(step: int, losses: Mapping[str, float]) -> str:
    """Return the line that a run prints for an evaluation.

    Args:
        losses: the mean as `loss`, and the losses of its sources.
    """
    sources = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items() if name != "loss")
    return f"step {step}: eval_loss {losses['loss']:.4f}" + (f" ({sources})" if sources else "")


def source_names(sources: Sequence[str | Source]) -> list[str]:
    """Return a unique name of each source, never `loss`: the shortest of its path's last part without
    extension, its whole path, or that with a number."""
    paths = [source.path if isinstance(source, Source) else source for source in sources]
    short = [path.rstrip("/").rpartition("/")[2].partition(".")[0] or path for path in paths]
    for names in (short, paths):
        if len({*names, "loss"}) > len(names):
            return names
    return [f"{path} {number}" for number, path in enumerate(paths, 1)]


def rows_by_source(
    samples: Samples, sources: Sequence[str | Source], data: DataSettings, room: Room | None = None
) -> dict[str, PackedRows]:
    """Return the rows of each source that has samples, by its name."""
    rows_of = {}
    for number, name in enumerate(source_names(sources)):
        weights = [float(source == number) for source in range(len(sources))]
        epochs = Epochs(samples, data.max_length, data.packing, data.shuffle_seed, weights, room)
        if epochs.draws:
            rows_of[name] = epochs.of(0)
    return rows_of


class EvalBatches(Sequence[Batch]):
    """Evaluation batches, each built when it is asked for: those of data with pictures are large.

    Args:
        build: returns batch number i, with some of its rows or with all (None).
        count: the number of batches.
        rows: the rows of each batch; None for all.
    """

    def __init__(
        self,
        build: Callable[[int, Sequence[int] | None], Batch],
        count: int,
        rows: Sequence[int] | None = None,
    ) -> None:
        self._build, self._count, self._rows = build, count, rows

    def only(self, rows: Sequence[int]) -> EvalBatches:
        """Return the same batches with only some of their rows."""
        return EvalBatches(self._build, self._count, rows)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._build(index, self._rows)


def evaluation_batches(
    samples: Samples, rows: Mapping[str, Sequence[Row]], shape: BatchShape
) -> tuple[Sequence[Batch], list[EvalPart]]:
    """Build the evaluation batches: every row once, in order, each source in batches of its own.

    The norm is chosen so that the mean of (summed loss / norm) over the batches is the mean loss of a
    target, independent of which batch a target is in.

    Args:
        rows: the rows of each source, by its name.

    Returns:
        The batches, and which of them belong to each source.
    """
    chunks = {name: list(chunked(rows_of, shape.rows)) for name, rows_of in rows.items()}
    weights = samples.weights
    norm = int(weights.sum()) / sum(map(len, chunks.values()))
    every: list[list[Row]] = []
    parts = []
    for name, chunks_of in chunks.items():
        start, members = len(every), [i for chunk in chunks_of for row in chunk for i in row]
        every += chunks_of
        parts.append(EvalPart(name, slice(start, len(every)), norm / int(weights[members].sum())))

    def build(number: int, places: Sequence[int] | None) -> Batch:
        chunk, of_shape = every[number], shape
        if places is not None:
            chunk = [chunk[place] if place < len(chunk) else () for place in places]
            of_shape = replace(shape, rows=len(places))
        return fill(samples, chunk, of_shape, norm, number)

    if shape.pixels is not None:
        return EvalBatches(build, len(every)), parts
    return [build(number, None) for number in range(len(every))], parts
