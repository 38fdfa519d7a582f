"""A recipe's micro-batches, cut into the pieces that GPUs compute, whatever their number.

train.py's micro-batch is the rows of all its devices together. Here a process computes micro_batch_size rows
at a time; each row carries what its loss is multiplied by, so that the pieces of an optimizer step sum up to
the step's loss as the recipe's loss_normalization has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from runtime.backends.model import labels
from runtime.data.batches import Batch
from runtime.data.prepare import PreparedData


class Pieces:
    """The pieces of a run for one process.

    Args:
        prepared: the data, in the micro-batches of train.py.
        rows: of a piece: micro_batch_size.
        process, processes: which of how many this is.

    Attributes:
        per_step: pieces of an optimizer step on each process.
    """

    def __init__(
        self, prepared: PreparedData, rows: int, global_batch: int, process: int, processes: int
    ) -> None:
        self._prepared, self._rows = prepared, rows
        self._process, self._processes = process, processes
        self.per_step = global_batch // (rows * processes)
        self._window = lru_cache(maxsize=1)(self._window_of)

    def of(self, number: int) -> Batch:
        """This process's rows of piece `number` of the run, from 0.

        Returns:
            input_ids, position_ids and labels int64[B, T]; weights float32[B], of each target's negative
            log-likelihood, for a sum over pieces and processes that is the step's loss; tokens int64[], the
            number of real ones.
        """
        step, piece = divmod(number, self.per_step)
        return self._cut(self._window(step), piece)

    def evaluation(self) -> list[Batch]:
        """As `of`, of the evaluation data; their sum over pieces and processes is the loss of its targets.

        Each process has as many as every other; where the rows do not suffice, some are empty.
        """
        if not self._prepared.eval_batches:
            return []
        every = _joined(self._prepared.eval_batches)
        count = -(-len(every["weights"]) // (self._rows * self._processes))
        missing = count * self._rows * self._processes - len(every["weights"])
        padded = {
            name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in every.items()
        }
        return [self._cut(padded, piece) for piece in range(count)]

    def _window_of(self, step: int) -> Batch:
        """All rows of an optimizer step."""
        first = step * self._prepared.accumulation
        numbers = range(first, first + self._prepared.accumulation)
        return _joined([self._prepared.micro_batch(number) for number in numbers])

    def _cut(self, rows: Batch, piece: int) -> Batch:
        start = (piece * self._processes + self._process) * self._rows
        own = {name: array[start : start + self._rows] for name, array in rows.items()}
        return {
            "input_ids": own["tokens"].astype(np.int64),
            "position_ids": own["positions"].astype(np.int64),
            "labels": labels(own["tokens"], own["segment_ids"], own["loss_mask"]),
            "weights": own["weights"],
            "tokens": np.asarray(np.count_nonzero(own["segment_ids"])),
        }


def _joined(batches: Sequence[Batch]) -> Batch:
    """The rows of several micro-batches, whose losses are averaged, with the weights of their losses."""
    names = ("tokens", "positions", "segment_ids", "loss_mask")
    joined = {name: np.concatenate([batch[name] for batch in batches]) for name in names}
    weights = [
        np.full(len(batch["tokens"]), 0.0 if batch["norm"] == 0 else 1.0 / batch["norm"] / len(batches))
        for batch in batches
    ]
    return joined | {"weights": np.concatenate(weights).astype(np.float32)}
