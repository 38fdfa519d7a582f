"""A recipe's micro-batches, cut into the pieces that GPUs compute, for any number of GPUs.

train.py's micro-batch is the rows of all its devices together. Here, a process computes micro_batch_size rows
at a time, or the two rows of each of that many pairs of answers. Each row or pair carries the factor of its
loss, so that the pieces of an optimizer step sum up to the step's loss under the recipe's loss_normalization.
A loss that needs prompts with other rows' answers (KTO) makes one estimate per micro-batch of train.py. All
processes then compute one such micro-batch together at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np

from ...data.batches import Batch, EvalBatches, EvalPart, only
from ...data.prepare import PreparedData
from ...errors import UserError
from ...settings import TrainSettings
from ...training.objectives import OBJECTIVES
from ...training.preference_losses import mismatched
from ..peft_model import labels
from .picture_inputs import PictureInputs

OTHER = "other_"
"""Prefix of the names of a piece's arrays of prompts with other rows' answers."""


class Pieces:
    """The pieces of a run for one process.

    Args:
        prepared: the data, in the micro-batches of train.py.
        train: its micro_batch_size is the number of rows, or of pairs, of a piece; its objective sets the
            weights.
        process, processes: this process's index, and the number of processes.
        pictures: makes the model's arguments for the pictures of some rows; None for data without pictures.

    Attributes:
        per_step: pieces per optimizer step on each process.

    Raises:
        UserError: when the processes cannot share a micro-batch that has to be computed at once.
    """

    def __init__(
        self,
        prepared: PreparedData,
        train: TrainSettings,
        process: int,
        processes: int,
        pictures: PictureInputs | None = None,
    ) -> None:
        self._prepared, self._train, self._pictures = prepared, train, pictures
        rows = train.micro_batch_size
        if train.loss_type in OBJECTIVES[train.objective].mismatched:
            rows, left = divmod(prepared.rows, processes)
            if left:
                raise UserError(
                    f"objective {train.objective} takes the {prepared.rows} rows of a micro-batch at once, "
                    f"which {processes} processes cannot share",
                    f"give accelerate launch a --num_processes that divides {prepared.rows}",
                )
        self._rows = rows * prepared.samples.group
        self._process, self._processes = process, processes
        self.per_step = train.global_batch_size // (rows * processes)
        # The weights of preferences depend on the other rows of their micro-batch.
        self._whole = bool(OBJECTIVES[train.objective].format)
        self._weighed = lru_cache(maxsize=1)(self._weighed_of)

    def of(self, number: int) -> Batch:
        """Return this process's rows of piece `number` of the run, counted from 0.

        Returns:
            input_ids, position_ids and labels int64[B, T]; losses use the labels' log-probabilities;
            real bool[B, T], which tokens are not padding; share float32[], the piece's share of its step;
            tokens and targets int64[], the numbers of real tokens and of targets; and the losses' factors,
            with which the sum over pieces and processes is the step's loss:
            weights float32[B], of the negative log-likelihood of each of a row's labels (sft, ORPO, CPO);
            pair_weights float32[B], of the loss of a row's pair; 0 for a filler pair.
            For pairs also answers bool[B, T], which labels belong to an answer. For single answers desirable
            float32[B], as in a micro-batch. If the loss needs them, the arrays of prompts with other rows'
            answers: input_ids and so on, with the prefix OTHER. With pictures, the arrays of
            picture_inputs.py.
        """
        step, piece = divmod(number, self.per_step)
        accumulation = self._prepared.accumulation
        first = step * accumulation * self._prepared.rows
        numbers = range(first + self._start(piece), first + self._start(piece) + self._rows)
        return self._cut(self._gathered(self._prepared.micro_batch, numbers, accumulation))

    def evaluation(self) -> Sequence[Batch]:
        """Return the pieces of the evaluation data; their sum over pieces and processes is its targets' loss.

        Each process has the same number of pieces; some are empty if there are not enough rows.
        """
        places = [(part, piece) for part in self._parts for piece in range(self._count(part))]
        return EvalBatches(lambda number, _: self._held_out(*places[number]), len(places))

    @property
    def eval_parts(self) -> list[EvalPart]:
        """Return which of `evaluation`'s pieces belong to each source, if there are several sources."""
        out: list[EvalPart] = []
        total = sum(map(self._count, self._parts))
        for part, batches in zip(self._prepared.eval_parts, self._parts, strict=False):
            start = out[-1].batches.stop if out else 0
            # The pieces sum up to the loss, while the loss is the mean of batches.
            factor = part.factor * len(self._prepared.eval_batches) / total
            out.append(EvalPart(part.name, slice(start, start + self._count(batches)), factor))
        return out

    @property
    def _parts(self) -> list[range]:
        """Return the numbers of the evaluation batches, separately for each source."""
        whole = range(len(self._prepared.eval_batches))
        return [whole[part.batches] for part in self._prepared.eval_parts] or [whole]

    def _count(self, batches: range) -> int:
        """Return the number of pieces that the rows of some evaluation batches fill."""
        return -(-len(batches) * self._prepared.rows // (self._rows * self._processes))

    def _start(self, piece: int) -> int:
        """Return the first of this process's rows of a piece, among those of all pieces."""
        return (piece * self._processes + self._process) * self._rows

    def _held_out(self, batches: range, piece: int) -> Batch:
        """Return a piece of some evaluation batches, filled up with empty rows."""
        first, end = (number * self._prepared.rows for number in (batches.start, batches.stop))
        start = first + self._start(piece)
        numbers = range(start, min(start + self._rows, end))
        kept = numbers or range(first, first + 1)
        rows = self._gathered(self._prepared.eval_batch, kept, len(self._prepared.eval_batches))
        if not numbers:
            rows = {name: np.zeros_like(array) for name, array in rows.items()}
        missing = (0, self._rows - len(kept))
        return self._cut(
            {name: np.pad(array, [missing] + [(0, 0)] * (array.ndim - 1)) for name, array in rows.items()}
        )

    def _gathered(
        self, build: Callable[[int, Sequence[int] | None], Batch], numbers: range, of: int
    ) -> Batch:
        """Return rows of micro-batches whose losses are averaged, with the weights of the losses.

        Args:
            build: returns a micro-batch, or some of its rows.
            numbers: of the rows, counted over all micro-batches.
            of: the number of micro-batches whose losses are averaged.
        """
        size, parts = self._prepared.rows, []
        for batch, rows in groupby(numbers, lambda number: number // size):
            places = [number % size for number in rows]
            if self._whole:
                parts.append(only(self._weighed(build, batch, of), places))
            else:
                parts.append(_weighed(build(batch, places), of, self._train))
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _weighed_of(self, build: Callable[[int, Sequence[int] | None], Batch], batch: int, of: int) -> Batch:
        return _weighed(build(batch, None), of, self._train)

    def _cut(self, rows: Batch) -> Batch:
        if self._pictures is not None:
            rows = self._pictures.filled(rows)
        answers = labels(rows["tokens"], rows["segment_ids"], rows["loss_mask"]) != -100
        piece = {
            "input_ids": rows["tokens"].astype(np.int64),
            "position_ids": rows["positions"].astype(np.int64),
            "labels": labels(rows["tokens"], rows["segment_ids"], rows["scored"]),
            "real": rows["segment_ids"] > 0,
            "share": np.asarray(1 / (self.per_step * self._processes), np.float32),
            "tokens": np.asarray(np.count_nonzero(rows["segment_ids"])),
            "targets": np.asarray(np.count_nonzero(answers)),
        }
        if self._pictures is not None:
            piece |= self._pictures.arguments(rows)
        objective = OBJECTIVES[self._train.objective]
        if not objective.format:
            return piece | {"weights": rows["weights"]}
        piece["pair_weights"] = rows["pair_weights"]
        if not objective.pairs:
            return piece | {"desirable": rows["desirable"]} | _others(rows)
        piece["answers"] = answers
        return piece | {"weights": rows["weights"]} if objective.likelihood else piece


def _others(piece: Batch) -> Batch:
    """Return a piece's prompts with other rows' answers, which `mismatched` made; {} if there are none."""
    rows = {name.removeprefix(OTHER): array for name, array in piece.items() if name.startswith(OTHER)}
    if not rows:
        return {}
    return {
        f"{OTHER}input_ids": rows["tokens"].astype(np.int64),
        f"{OTHER}position_ids": rows["positions"].astype(np.int64),
        f"{OTHER}labels": labels(rows["tokens"], rows["segment_ids"], rows["loss_mask"]),
    }


def _weighed(batch: Batch, of: int, train: TrainSettings) -> Batch:
    """Return a micro-batch's rows with the tokens that its loss scores, and the weights.

    Args:
        of: the number of micro-batches whose losses are averaged.
    """
    rows = {name: value for name, value in batch.items() if value.ndim and name != "desirable"}
    weights = np.full(len(batch["tokens"]), 0.0 if batch["norm"] == 0 else 1.0 / batch["norm"] / of)
    rows["scored"] = batch["loss_mask"]
    objective = OBJECTIVES[train.objective]
    if objective.format == "unpaired_preference":
        answered = _targets(batch, batch["loss_mask"]).any(1)
        rows["pair_weights"] = (weights * answered).astype(np.float32)
        rows["desirable"] = batch["desirable"] / np.float32(of)
        if train.loss_type in objective.mismatched:
            others = mismatched(np, batch, train.micro_batch_size)
            rows |= {f"{OTHER}{name}": array for name, array in others.items()}
    elif objective.pairs:
        answered = _targets(batch, batch["loss_mask"]).any(1).reshape(-1, 2).all(1)
        rows["pair_weights"] = (weights * np.repeat(answered, 2)).astype(np.float32)
        if likelihood := objective.likelihood:
            chosen = np.arange(len(weights)) % 2 == 0
            learned = batch["loss_mask"] if likelihood == "answer" else batch["segment_ids"] > 0
            text = learned & (chosen & np.repeat(answered, 2))[:, None]
            rows["scored"] = np.where(chosen[:, None], text, batch["loss_mask"])
            # train.py's likelihood is the mean over the tokens of its micro-batch, times its number of pairs.
            weights *= chosen * answered.sum() / max(np.count_nonzero(_targets(batch, text)), 1)
    return rows | {"weights": weights.astype(np.float32)}


def _targets(batch: Batch, mask: np.ndarray) -> np.ndarray:
    """Return bool[B, T]: which of the masked tokens are predicted from within their own segments."""
    return labels(batch["tokens"], batch["segment_ids"], mask) != -100
