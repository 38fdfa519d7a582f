"""Prepare the batches of a run from the sources of a recipe."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ..errors import UserError, say
from ..settings import DataSettings, TrainSettings
from ..training.objectives import generated, stores
from . import token_cache
from .advice import balance, check_split
from .batches import (
    Batch,
    Batching,
    BatchSchedule,
    BatchShape,
    EvalBatches,
    EvalPart,
    Schedule,
    evaluation_batches,
    only,
    rows_by_source,
)
from .encoding import Coding, coding, of_prompts
from .epochs import (
    Epochs,
    Room,
    check_draws,
    hardly_drawn,
    measure_rows,
    room_of,
    source_weights,
    undrawn,
)
from .image_processor import image_processor, load_image_settings
from .pictures import kept_pictures
from .pixels import Pixels
from .prompt_order import PromptSchedule
from .row_counts import DataReport, SplitReport
from .samples import Samples, repeated_notes
from .sources import Split, open_rows, splits
from .stored_teacher import EVAL, TRAIN, StoredTeacher
from .stream import StreamSchedule, Windows
from .tokenizer import chat_templates
from .workers import tokenize


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, tokenized.

    Attributes:
        steps_per_epoch: optimizer steps of one pass over the training data: rows / global batch size,
            rounded up; None for a stream, whose length is not known.
        total_steps: optimizer steps of the run.
        accumulation: micro-batches of an optimizer step.
        eval_batches: all evaluation data; empty if there is none.
        eval_parts: the evaluation batches of each source, if there are several.
        held_out: the evaluation data, None without.
        stored: the teacher's stored log-probabilities, None without.
        held_out_parts: the samples of each of its sources, in a run that scores completions of it.
        report: what was read, kept and left out.
        samples: the training samples, in the order of the sources; for a stream, those of the first window
            that was read.
        fingerprint: digest of the training samples and of what decides their order; for a stream, of its
            files' names and sizes instead of the samples.
    """

    steps_per_epoch: int | None
    total_steps: int
    accumulation: int
    eval_batches: Sequence[Batch]
    report: DataReport
    samples: Samples
    fingerprint: str
    schedule: Schedule
    shuffle_seed: int | None
    eval_parts: Sequence[EvalPart] = ()
    held_out: Samples | None = None
    stored: StoredTeacher | None = None
    held_out_parts: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Return the number of rows of a micro-batch on all devices together; a preference has two."""
        return self.schedule.rows

    @property
    def ends(self) -> tuple[int, ...]:
        """Return the tokens with which the training data ends an answer."""
        return tuple(sorted(map(int, self.report.train.ends)))

    def batches(self, steps: int | None = None, start: int = 0, rows: Sequence[int] | None = None) -> Any:
        """Return micro-batches of optimizer steps start ... steps - 1, as a grain.IterDataset.

        They depend only on the data, the settings and the seed, not on `start`: a resumed run sees the same
        batches as an uninterrupted one. Batches before `start` are not built.

        Args:
            steps: None takes the run's; it may exceed one or more passes over the data.
            rows: the rows of each micro-batch that this process's devices hold (`sharding.Rows`); all
                when None.
        """
        import grain

        stop = self.total_steps if steps is None else steps
        indices = grain.MapDataset.range(start * self.accumulation, stop * self.accumulation)
        batches = indices.map(lambda index: self.micro_batch(index, rows))
        # One thread builds batches ahead.
        return batches.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4))

    def micro_batch(self, index: int, rows: Sequence[int] | None = None) -> Batch:
        """Build micro-batch number `index` of the run, from 0, or some of its rows."""
        return self.schedule.micro_batch(index, rows)

    def tokens_of(self, index: int) -> int:
        """Return the number of real tokens of micro-batch number `index`."""
        return self.schedule.tokens_of(index)

    def evaluation(self, rows: Sequence[int] | None = None) -> Sequence[Batch]:
        """Return the evaluation batches, or some rows of each."""
        if rows is not None and isinstance(self.eval_batches, EvalBatches):
            return self.eval_batches.only(rows)
        return self.eval_batches if rows is None else [only(batch, rows) for batch in self.eval_batches]

    def eval_batch(self, number: int, rows: Sequence[int] | None = None) -> Batch:
        """Return an evaluation batch, or some of its rows."""
        batches = self.eval_batches
        if rows is None:
            return batches[number]
        return batches.only(rows)[number] if isinstance(batches, EvalBatches) else only(batches[number], rows)

    def state(self, step: int) -> dict[str, Any]:
        """Return the data's position after optimizer step `step`, as JSON values for its checkpoint."""
        return {
            "rows": step * self.schedule.rows_per_step,
            "shuffle_seed": self.shuffle_seed,
            "fingerprint": self.fingerprint,
            **self.schedule.state(step),
        }

    def origins(self, index: int) -> list[str]:
        """Return the origins (FILE:LINE and the like) of micro-batch `index`'s samples, row by row."""
        return self.schedule.origins(index)

    def close(self) -> None:
        """End reading ahead."""
        self.schedule.close()


@dataclass(frozen=True)
class Tokenizing:
    """How to tokenize, and from which position to continue.

    Attributes:
        cache: folder in which tokenized data is kept, under data/, and looked for; None for none. A stream is
            not kept.
        workers: processes that tokenize, None for a suitable number.
        after: `PreparedData.state` of the step after which the run continues; None for its beginning.
        model_dir: the checkpoint's folder, whose image processor data with pictures needs.
    """

    cache: Path | None = None
    workers: int | None = None
    after: Mapping[str, Any] | None = None
    model_dir: Path | None = None


def prepare(
    data: DataSettings,
    train: TrainSettings,
    rows: int,
    tokenizer: Any,
    data_dir: Path,
    vocabulary: int | None = None,
    tokenizing: Tokenizing = Tokenizing(),
) -> PreparedData:
    """Read, render, tokenize and pack the data of a recipe.

    Args:
        rows: rows of a micro-batch on all devices together: micro_batch_size x data-parallel devices.
        tokenizer: from `load_tokenizer`.
        data_dir: the base of relative paths.
        vocabulary: number of the model's embeddings; samples with larger token ids are left out.
        tokenizing: cache, workers, start position and image processor.

    Raises:
        UserError: the files or settings give nothing to train on, or contradict each other.
    """
    if rows < 1 or train.global_batch_size % rows:
        raise UserError(
            f"a global batch of {train.global_batch_size} rows cannot be made of micro-batches of {rows}",
            "global_batch_size must be a multiple of micro_batch_size x dcn x fsdp x ep of the mesh",
        )
    accumulation = train.global_batch_size // rows
    pad = tokenizer.pad_token_id
    images = None
    if data.images is not None:
        assert tokenizing.model_dir is not None
        images = load_image_settings(
            tokenizing.model_dir, tokenizer, data.images, kept_pictures(tokenizing.cache)
        )
    shape = BatchShape(rows, data.max_length, 0 if pad is None else int(pad))
    if generated(train, data.max_length) is not None:
        data = replace(data, packing=False)
    batching = Batching(shape, accumulation, train.loss_normalization == "tokens")

    def coded(split: Split) -> Coding:
        templates = chat_templates(tokenizer, data, data_dir, split.sources)
        return of_prompts(coding(tokenizer, templates, data, vocabulary, split.sources, images), train)

    stored = None
    if train.distill is not None and stores(train):
        stored = StoredTeacher.open(data_dir / str(train.distill.stored), train.distill)
    trained_on, evaluated_on = splits(data, data_dir)
    held: tuple[Samples, SplitReport] | None = None
    room: Room | None = None
    if data.stream_window is not None:
        training = _streamed(data, train, coded(trained_on), data_dir, tokenizing, batching)
    else:
        read, report = read_split(trained_on, data, coded(trained_on), data_dir, tokenizing)
        if evaluated_on is not None and images is not None:
            held = read_split(evaluated_on, data, coded(evaluated_on), data_dir, tokenizing)
        if images is not None:
            room = room_of(read, None if held is None else held[0], data, image_processor(images).unit)
            shape = replace(shape, pixels=Pixels(images, room.patches))
            batching = replace(batching, shape=shape)
        if stored is not None:
            batching = replace(batching, shape=replace(shape, teacher=stored.part(TRAIN, read)))
        training = _in_epochs(read, report, data, train, batching, tokenizing.after, room)
    samples, schedule, per_epoch = training.samples, training.schedule, training.schedule.steps_per_epoch
    total = train.steps if train.steps is not None else math.ceil((train.epochs or 1) * (per_epoch or 0))
    notes = [*training.notes]
    if len(data.train) > 1:
        notes += repeated_notes(data.train, samples)
        notes += _undrawn_notes(training, data, total, total * train.global_batch_size)
    eval_batches: Sequence[Batch] = []
    eval_parts: list[EvalPart] = []
    eval_report, kept = None, None
    kept_parts: dict[str, list[int]] = {}
    if evaluated_on is not None:
        if held is None:
            held = read_split(evaluated_on, data, coded(evaluated_on), data_dir, tokenizing)
        held_out, eval_report = held
        check_split(evaluated_on.name, eval_report, data)
        rows_of = rows_by_source(held_out, evaluated_on.sources, data, room)
        measure_rows(eval_report, list(rows_of.values()), held_out, room)
        eval_report.shared = held_out.shared_with(samples)
        if isinstance(schedule, StreamSchedule):
            schedule.hold_out(held_out)
        kept = held_out
        if train.grpo is None:
            if stored is not None:
                shape = replace(shape, teacher=stored.part(EVAL, held_out))
            eval_batches, eval_parts = evaluation_batches(held_out, rows_of, shape)
        else:
            kept_parts = {name: [i for row in rows for i in row] for name, rows in rows_of.items()}

    order = [training.content, data.max_length, data.packing, data.shuffle_seed, training.weights]
    order += [data.curriculum] if data.curriculum else []
    order += [asdict(room), images.identity] if room is not None and images is not None else []
    return PreparedData(
        steps_per_epoch=per_epoch,
        total_steps=total,
        accumulation=accumulation,
        eval_batches=eval_batches,
        report=DataReport(training.report, eval_report, per_epoch, total, data.packing, notes),
        samples=samples,
        fingerprint=hashlib.sha256(json.dumps(order).encode()).hexdigest(),
        schedule=schedule,
        stored=stored,
        shuffle_seed=data.shuffle_seed,
        eval_parts=eval_parts if len(eval_parts) > 1 else (),
        held_out=kept,
        held_out_parts=kept_parts,
    )


def read_split(
    split: Split,
    data: DataSettings,
    how: Coding,
    data_dir: Path,
    tokenizing: Tokenizing,
) -> tuple[Samples, SplitReport]:
    """Read the samples of a split, from the cache if they are in it. There may be none.

    Raises:
        UserError: a source cannot be read, or a row is refused.
    """
    folder: Path | None = None
    reason = ""
    if tokenizing.cache is not None:
        key, reason = token_cache.key(split.sources, data, how, data_dir, split.part)
        folder = None if key is None else tokenizing.cache / "data" / key
    if folder is not None and (kept := token_cache.load(folder, how.images)) is not None:
        return kept
    readers = open_rows(split.sources, data, data_dir, split.chosen())
    samples, report = tokenize(readers, how, data, tokenizing.workers, f"tokenizing {split.name}")
    if reason:
        say(f"note: the tokenized data is not kept: {reason}")
    if folder is not None and len(samples):
        token_cache.save(folder, samples, report)
    return samples, report


@dataclass(frozen=True)
class _Training:
    """The training data of a run.

    Attributes:
        samples, report: what was read; of a stream, its first window.
        schedule: the rows of each micro-batch.
        weights: the weight of each source.
        content: digest of what the schedule draws from.
        notes: remarks for the report.
    """

    samples: Samples
    report: SplitReport
    schedule: Schedule
    weights: Sequence[float]
    content: str
    notes: Sequence[str] = ()


def _streamed(
    data: DataSettings,
    train: TrainSettings,
    how: Coding,
    data_dir: Path,
    tokenizing: Tokenizing,
    batching: Batching,
) -> _Training:
    """Begin to read the training data of a stream."""
    if train.steps is None:
        raise UserError(
            "epochs of a stream cannot be counted", "give train.steps, or remove data.stream_window"
        )
    windows = Windows(data, how, data_dir, tokenizing.workers)
    schedule = StreamSchedule(windows, tokenizing.after, batching)
    first = schedule.window
    return _Training(first.samples, first.report, schedule, windows.weights, windows.made_of)


def _in_epochs(
    samples: Samples,
    report: SplitReport,
    data: DataSettings,
    train: TrainSettings,
    batching: Batching,
    after: Mapping[str, Any] | None,
    room: Room | None = None,
) -> _Training:
    """Draw the epochs of training data that was read; the report gets the rows of an epoch."""
    check_split("data.train", report, data)
    notes = []
    if len(samples.liked):
        liked, both = int(samples.liked.sum()), (train.desirable_weight, train.undesirable_weight)
        if unbalanced := balance(liked, len(samples) - liked, both):
            notes.append("; ".join(unbalanced))
    weights = source_weights(samples, data)
    epochs = Epochs(samples, data.max_length, data.packing, data.shuffle_seed, weights, room)
    check_draws(epochs.draws, report.samples)
    measure_rows(report, [epochs.of(0)], samples, room)
    if room is not None and not report.pictures:
        notes.append("data.images is set, and no sample has a picture: rows reserve room for one")
    by_length = data.curriculum == "length"
    if train.grpo is not None:
        prompts = PromptSchedule(samples, epochs, batching, data.shuffle_seed, by_length, train.grpo, after)
        return _Training(samples, report, prompts, weights, samples.digest, notes)
    schedule = BatchSchedule(samples, epochs, batching, data.shuffle_seed, by_length)
    return _Training(samples, report, schedule, weights, samples.digest, notes)


def _undrawn_notes(training: _Training, data: DataSettings, steps: int, rows: int) -> list[str]:
    """Return notes on sources that the run does not train on, or hardly.

    Args:
        steps, rows: optimizer steps of the run, and rows of these.
    """
    schedule, report = training.schedule, training.report
    if isinstance(schedule, BatchSchedule):
        lengths = steps, schedule.steps_per_epoch
        return undrawn(data.train, training.weights, training.samples, schedule.drawn(steps), lengths)
    if not report.rows:
        return []
    return hardly_drawn(data.train, training.weights, rows * report.samples / report.rows)
