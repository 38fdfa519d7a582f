"""A recipe's micro-batches, cut into the pieces that GPUs compute, whatever their number.

train.py's micro-batch is the rows of all its devices together. Here a process computes micro_batch_size rows
at a time, or the two rows of each of as many pairs of answers. Each row, and each pair, carries what its loss
is multiplied by, so that the pieces of an optimizer step sum up to the step's loss as the recipe's
loss_normalization has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from ...data.batches import Batch, EvalPart
from ...data.prepare import PreparedData
from ...training.objectives import OBJECTIVES
from ..model import labels


class Pieces:
    """The pieces of a run for one process.

    Args:
        prepared: the data, in the micro-batches of train.py.
        rows: of a piece, or pairs of them: micro_batch_size.
        process, processes: which of how many this is.
        objective: a key of OBJECTIVES, whose weights the pieces have.

    Attributes:
        per_step: pieces of an optimizer step on each process.
    """

    def __init__(
        self,
        prepared: PreparedData,
        rows: int,
        global_batch: int,
        process: int,
        processes: int,
        objective: str = "sft",
    ) -> None:
        self._prepared, self._objective = prepared, objective
        self._rows = rows * prepared.samples.group
        self._process, self._processes = process, processes
        self.per_step = global_batch // (rows * processes)
        self._window = lru_cache(maxsize=1)(self._window_of)

    def of(self, number: int) -> Batch:
        """This process's rows of piece `number` of the run, from 0.

        Returns:
            input_ids, position_ids and labels int64[B, T], the labels being what log-probabilities are wanted
            of; real bool[B, T], which tokens are no padding; share float32[], the piece's of its step; tokens
            and targets int64[], the numbers of real tokens and of those that are targets; and by what losses
            are multiplied, for a sum over pieces and processes that is the step's loss:
            weights float32[B], of the negative log-likelihood of each of a row's labels (sft, ORPO, CPO);
            pair_weights float32[B], of the loss of a row's pair, 0 for one that fills a batch up.
            Of pairs, answers bool[B, T] too: which of the labels are an answer's.
        """
        step, piece = divmod(number, self.per_step)
        return self._cut(self._window(step), piece)

    def evaluation(self) -> list[Batch]:
        """As `of`, of the evaluation data; their sum over pieces and processes is the loss of its targets.

        Each process has as many as every other; where the rows do not suffice, some are empty.
        """
        return [piece for part in self._held_out for piece in part]

    @property
    def eval_parts(self) -> list[EvalPart]:
        """Which of `evaluation`'s pieces are each source's, where there are several."""
        out: list[EvalPart] = []
        total = sum(map(len, self._held_out))
        for part, pieces in zip(self._prepared.eval_parts, self._held_out, strict=False):
            start = out[-1].batches.stop if out else 0
            # The pieces sum up to the loss, where batches have it as their mean.
            factor = part.factor * len(self._prepared.eval_batches) / total
            out.append(EvalPart(part.name, slice(start, start + len(pieces)), factor))
        return out

    @cached_property
    def _held_out(self) -> list[list[Batch]]:
        """The pieces of the evaluation data, those of each source apart."""
        batches = self._prepared.eval_batches
        if not batches:
            return []
        every = _weighed_each(batches, self._objective)
        parts = [part.batches for part in self._prepared.eval_parts] or [slice(None)]
        return [self._pieces(_concatenated(every[part])) for part in parts]

    def _pieces(self, rows: Batch) -> list[Batch]:
        """All rows, filled up with empty ones."""
        count = -(-len(rows["weights"]) // (self._rows * self._processes))
        missing = count * self._rows * self._processes - len(rows["weights"])
        padded = {
            name: np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1)) for name, array in rows.items()
        }
        return [self._cut(padded, piece) for piece in range(count)]

    def _window_of(self, step: int) -> Batch:
        """All rows of an optimizer step."""
        first = step * self._prepared.accumulation
        numbers = range(first, first + self._prepared.accumulation)
        return _joined([self._prepared.micro_batch(number) for number in numbers], self._objective)

    def _cut(self, rows: Batch, piece: int) -> Batch:
        start = (piece * self._processes + self._process) * self._rows
        own = {name: array[start : start + self._rows] for name, array in rows.items()}
        answers = labels(own["tokens"], own["segment_ids"], own["loss_mask"]) != -100
        cut = {
            "input_ids": own["tokens"].astype(np.int64),
            "position_ids": own["positions"].astype(np.int64),
            "labels": labels(own["tokens"], own["segment_ids"], own["scored"]),
            "real": own["segment_ids"] > 0,
            "share": np.asarray(1 / (self.per_step * self._processes), np.float32),
            "tokens": np.asarray(np.count_nonzero(own["segment_ids"])),
            "targets": np.asarray(np.count_nonzero(answers)),
        }
        objective = OBJECTIVES[self._objective]
        if not objective.pairs:
            return cut | {"weights": own["weights"]}
        cut |= {"pair_weights": own["pair_weights"], "answers": answers}
        return cut | {"weights": own["weights"]} if objective.likelihood else cut


def _joined(batches: Sequence[Batch], objective: str) -> Batch:
    """The rows of several micro-batches, whose losses are averaged, with the weights of their losses."""
    return _concatenated(_weighed_each(batches, objective))


def _weighed_each(batches: Sequence[Batch], objective: str) -> list[Batch]:
    return [_weighed(batch, len(batches), objective) for batch in batches]


def _concatenated(made: Sequence[Batch]) -> Batch:
    return {name: np.concatenate([one[name] for one in made]) for name in made[0]}


def _weighed(batch: Batch, of: int, objective: str) -> Batch:
    """A micro-batch's rows, the tokens of each whose log-probabilities its loss is made of, and its weights.

    Args:
        of: the number of micro-batches whose losses are averaged.
    """
    rows = {name: batch[name] for name in ("tokens", "positions", "segment_ids", "loss_mask")}
    weights = np.full(len(batch["tokens"]), 0.0 if batch["norm"] == 0 else 1.0 / batch["norm"] / of)
    rows["scored"] = batch["loss_mask"]
    if OBJECTIVES[objective].pairs:
        answered = _targets(batch, batch["loss_mask"]).any(1).reshape(-1, 2).all(1)
        rows["pair_weights"] = (weights * np.repeat(answered, 2)).astype(np.float32)
        if likelihood := OBJECTIVES[objective].likelihood:
            chosen = np.arange(len(weights)) % 2 == 0
            learnt = batch["loss_mask"] if likelihood == "answer" else batch["segment_ids"] > 0
            text = learnt & (chosen & np.repeat(answered, 2))[:, None]
            rows["scored"] = np.where(chosen[:, None], text, batch["loss_mask"])
            # train.py's likelihood is the mean over the tokens of its micro-batch, times the pairs in it.
            weights *= chosen * answered.sum() / max(np.count_nonzero(_targets(batch, text)), 1)
    return rows | {"weights": weights.astype(np.float32)}


def _targets(batch: Batch, mask: np.ndarray) -> np.ndarray:
    """bool[B, T]: which of the masked tokens are predicted from within their own segments."""
    return labels(batch["tokens"], batch["segment_ids"], mask) != -100
