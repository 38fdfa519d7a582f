"""From the files of a recipe to the batches of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.data.batches import Batch, Rows, Schedule, Shape, evaluation_batches, iterate
from runtime.data.masking import Renderer
from runtime.data.reading import read_rows
from runtime.data.report import DataReport, SplitReport
from runtime.data.samples import Sample, make_samples
from runtime.data.tokenizer import chat_template
from runtime.errors import UserError
from runtime.settings import DataSettings, TrainSettings


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, tokenised.

    Attributes:
        steps_per_epoch: optimizer steps of one pass over the training data: rows / global batch size,
            rounded up.
        total_steps: optimizer steps of the run.
        accumulation: micro-batches of an optimizer step.
        eval_batches: the evaluation data, whole; empty without any.
        report: what was read, kept and left out.
    """

    steps_per_epoch: int
    total_steps: int
    accumulation: int
    eval_batches: list[Batch]
    report: DataReport
    schedule: Schedule

    def batches(self, steps: int | None = None, start: int = 0) -> Any:
        """Micro-batches of optimizer steps start ... steps - 1, a grain.IterDataset.

        They depend on the data, the settings and the seed alone, not on `start`: a resumed run sees
        what the interrupted one would have seen. Nothing before `start` is built.

        Args:
            steps: the run's when None; it may pass over the data any number of times.
        """
        stop = self.total_steps if steps is None else steps
        return iterate(self.micro_batch, start * self.accumulation, stop * self.accumulation)

    def micro_batch(self, index: int) -> Batch:
        """Micro-batch number `index` of the run, from 0."""
        return self.schedule.micro_batch(index)


def prepare(
    data: DataSettings,
    train: TrainSettings,
    rows: int,
    tokenizer: Any,
    data_dir: Path,
    vocabulary: int | None = None,
) -> PreparedData:
    """Reads, renders, tokenises, packs.

    Args:
        rows: rows of a micro-batch on all devices together: micro_batch_size x data-parallel devices.
        tokenizer: of `load_tokenizer`.
        data_dir: what relative paths are relative to.
        vocabulary: embeddings of the model; samples with another token id are left out.

    Raises:
        UserError: the files or the settings give nothing to train on, or contradict one another.
    """
    if rows < 1 or train.global_batch_size % rows:
        raise UserError(
            f"a global batch of {train.global_batch_size} rows cannot be made of micro-batches of {rows}",
            "global_batch_size must be a multiple of micro_batch_size x the fsdp axis",
        )
    accumulation = train.global_batch_size // rows
    renderer = Renderer(tokenizer, chat_template(tokenizer, data, data_dir), data.loss_on)
    pad = tokenizer.pad_token_id
    shape = Shape(rows, data.max_length, 0 if pad is None else int(pad))

    samples, train_report = _split("data.train", data.train, data, renderer, tokenizer, data_dir, vocabulary)
    train_rows = Rows(samples, data.max_length, data.packing, data.shuffle_seed)
    train_report.rows = len(train_rows.of(0))
    by_tokens = train.loss_normalization == "tokens"
    schedule = Schedule(samples, train_rows, shape, accumulation, by_tokens, data.shuffle_seed)

    eval_batches: list[Batch] = []
    eval_report = None
    if data.eval:
        held_out, eval_report = _split(
            "data.eval", data.eval, data, renderer, tokenizer, data_dir, vocabulary
        )
        eval_rows = Rows(held_out, data.max_length, data.packing, data.shuffle_seed).of(0)
        eval_report.rows = len(eval_rows)
        eval_batches = evaluation_batches(held_out, eval_rows, shape)

    total = (
        train.steps if train.steps is not None else math.ceil((train.epochs or 1) * schedule.steps_per_epoch)
    )
    return PreparedData(
        steps_per_epoch=schedule.steps_per_epoch,
        total_steps=total,
        accumulation=accumulation,
        eval_batches=eval_batches,
        report=DataReport(train_report, eval_report, schedule.steps_per_epoch, total, data.packing),
        schedule=schedule,
    )


def _split(
    name: str,
    paths: tuple[str, ...],
    data: DataSettings,
    renderer: Renderer,
    tokenizer: Any,
    data_dir: Path,
    vocabulary: int | None,
) -> tuple[list[Sample], SplitReport]:
    report = SplitReport(row_length=data.max_length)
    rows, report.read = read_rows(paths, data.fields, data_dir, report.malformed)
    samples = make_samples(rows, renderer, tokenizer, data.max_length, data.overlong, report, vocabulary)
    if not samples:
        raise UserError(
            f"none of the {report.read} rows of {name} can be used: " + "; ".join(report.notes()[:3]),
            _remedy(report),
        )
    for problems, what in ((report.malformed, "malformed"), (report.inconsistent, "without clear targets")):
        if problems.count * 2 > report.read:
            raise UserError(
                f"{problems.count} of {report.read} rows of {name} are {what}; the first is "
                f"{problems.first[0].origin}: {problems.first[0].reason}",
                _remedy(report),
            )
    return samples, report


def _remedy(report: SplitReport) -> str:
    """What helps against the commonest reason for leaving rows out."""
    commonest = max((report.malformed, report.inconsistent, report.overlong), key=lambda p: p.count)
    if commonest is report.overlong:
        return "raise data.max_length, or set data.overlong to truncate"
    if commonest is report.inconsistent:
        return (
            "use a chat template with {% generation %} markers around what the assistant writes "
            "(data.chat_template), or data.loss_on: last_assistant"
        )
    return "rows must be conversations that the chat template accepts; see the first reasons"
