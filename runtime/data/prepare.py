"""From the sources of a recipe to the batches of a run."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..settings import DataSettings, Source, TrainSettings
from . import cache as caching
from .advice import LEFTOVER, WRITTEN, folding
from .batches import Batch, BatchSchedule, BatchShape, EvalPart, evaluation_batches, iterate, only
from .encoding import Coding, coding
from .epochs import Epochs, PackedRows, tempered
from .masking import NO_SYSTEM, check_loss_on
from .report import DataReport, SplitReport
from .samples import Samples
from .sources import Split, open_split, source_names, splits
from .tokenising import tokenise
from .tokenizer import chat_template


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, tokenised.

    Attributes:
        steps_per_epoch: optimizer steps of one pass over the training data: rows / global batch size,
            rounded up.
        total_steps: optimizer steps of the run.
        accumulation: micro-batches of an optimizer step.
        eval_batches: the evaluation data, whole; empty without any.
        eval_parts: which of them are each source's, where it has several.
        report: what was read, kept and left out.
        samples: of the training data, in the order of its sources.
        fingerprint: digest of the training samples and of what decides their order.
    """

    steps_per_epoch: int
    total_steps: int
    accumulation: int
    eval_batches: list[Batch]
    report: DataReport
    samples: Samples
    fingerprint: str
    schedule: BatchSchedule
    shuffle_seed: int | None
    eval_parts: Sequence[EvalPart] = ()

    @property
    def rows(self) -> int:
        """Rows of a micro-batch, on all devices together; a preference has two."""
        return self.schedule.rows

    def batches(self, steps: int | None = None, start: int = 0, rows: Sequence[int] | None = None) -> Any:
        """Micro-batches of optimizer steps start ... steps - 1, a grain.IterDataset.

        They depend on the data, the settings and the seed alone, not on `start`: a resumed run sees
        what the interrupted one would have seen. Nothing before `start` is built.

        Args:
            steps: the run's when None; it may pass over the data any number of times.
            rows: of each micro-batch, those that this process's devices hold (`sharding.Rows`); all
                when None.
        """
        stop = self.total_steps if steps is None else steps
        return iterate(
            lambda index: self.micro_batch(index, rows), start * self.accumulation, stop * self.accumulation
        )

    def micro_batch(self, index: int, rows: Sequence[int] | None = None) -> Batch:
        """Micro-batch number `index` of the run, from 0, or some of its rows."""
        return self.schedule.micro_batch(index, rows)

    def tokens_of(self, index: int) -> int:
        """Real tokens of micro-batch number `index`."""
        return self.schedule.tokens_of(index)

    def evaluation(self, rows: Sequence[int] | None = None) -> list[Batch]:
        """The evaluation batches, or some rows of each."""
        return self.eval_batches if rows is None else [only(batch, rows) for batch in self.eval_batches]

    def state(self, step: int) -> dict[str, Any]:
        """Where the data is after optimizer step `step`, for its checkpoint: plain JSON values."""
        return {
            "rows": step * self.schedule.rows_per_step,
            "shuffle_seed": self.shuffle_seed,
            "fingerprint": self.fingerprint,
        }

    def origins(self, index: int) -> list[str]:
        """Where the samples of micro-batch `index` stand, FILE:LINE and the like, row after row."""
        return [self.samples.origin(sample) for sample in self.schedule.samples_of(index)]


@dataclass(frozen=True)
class Tokenising:
    """What makes tokenising quick.

    Attributes:
        cache: folder in which tokenised data is kept, under data/, and looked for; None for none.
        workers: processes that tokenise, None for as many as pay.
    """

    cache: Path | None = None
    workers: int | None = None


def prepare(
    data: DataSettings,
    train: TrainSettings,
    rows: int,
    tokenizer: Any,
    data_dir: Path,
    vocabulary: int | None = None,
    tokenising: Tokenising = Tokenising(),
) -> PreparedData:
    """Reads, renders, tokenises, packs.

    Args:
        rows: rows of a micro-batch on all devices together: micro_batch_size x data-parallel devices.
        tokenizer: of `load_tokenizer`.
        data_dir: what relative paths are relative to.
        vocabulary: embeddings of the model; samples with another token id are left out.
        tokenising: what makes it quick.

    Raises:
        UserError: the files or the settings give nothing to train on, or contradict one another.
    """
    if rows < 1 or train.global_batch_size % rows:
        raise UserError(
            f"a global batch of {train.global_batch_size} rows cannot be made of micro-batches of {rows}",
            "global_batch_size must be a multiple of micro_batch_size x the fsdp axis",
        )
    accumulation = train.global_batch_size // rows
    check_loss_on(data)
    template = chat_template(tokenizer, data, data_dir)
    pad = tokenizer.pad_token_id
    shape = BatchShape(rows, data.max_length, 0 if pad is None else int(pad))

    trained_on, evaluated_on = splits(data, data_dir)
    how = coding(tokenizer, template, data, vocabulary, trained_on.sources)
    samples, train_report = read_split(trained_on, data, how, data_dir, tokenising)
    check_split("data.train", train_report, data)
    note = ""
    if len(samples.liked):
        from .unpaired import balance

        liked, both = int(samples.liked.sum()), (train.desirable_weight, train.undesirable_weight)
        note = "; ".join(balance(liked, len(samples) - liked, both) or ())
    weights = source_weights(samples, data)
    epochs = Epochs(samples, data.max_length, data.packing, data.shuffle_seed, weights)
    if not epochs.draws:
        raise UserError(
            f"an epoch draws none of the {len(samples)} samples of data.train",
            "weights are shares of a source's samples: raise data.train[].weight",
        )
    count_rows(train_report, [epochs.of(0)], samples)
    by_tokens = train.loss_normalization == "tokens"
    by_length = data.curriculum == "length"
    schedule = BatchSchedule(samples, epochs, shape, accumulation, by_tokens, data.shuffle_seed, by_length)

    eval_batches: list[Batch] = []
    eval_parts: list[EvalPart] = []
    eval_report = None
    if evaluated_on is not None:
        how = coding(tokenizer, template, data, vocabulary, evaluated_on.sources)
        held_out, eval_report = read_split(evaluated_on, data, how, data_dir, tokenising)
        check_split(evaluated_on.name, eval_report, data)
        rows_of = rows_by_source(held_out, evaluated_on, data)
        count_rows(eval_report, list(rows_of.values()), held_out)
        eval_batches, eval_parts = evaluation_batches(held_out, rows_of, shape)

    total = (
        train.steps if train.steps is not None else math.ceil((train.epochs or 1) * schedule.steps_per_epoch)
    )
    order = [samples.digest, data.max_length, data.packing, data.shuffle_seed, weights]
    order += [data.curriculum] if data.curriculum else []
    return PreparedData(
        steps_per_epoch=schedule.steps_per_epoch,
        total_steps=total,
        accumulation=accumulation,
        eval_batches=eval_batches,
        report=DataReport(train_report, eval_report, schedule.steps_per_epoch, total, data.packing, note),
        samples=samples,
        fingerprint=hashlib.sha256(json.dumps(order).encode()).hexdigest(),
        schedule=schedule,
        shuffle_seed=data.shuffle_seed,
        eval_parts=eval_parts if len(eval_parts) > 1 else (),
    )


def source_weights(samples: Samples, data: DataSettings) -> list[float]:
    """How often an epoch draws each sample of a source of data.train.

    Args:
        samples: of the training data.
    """
    if data.temperature is None:
        return [source.weight if isinstance(source, Source) else 1.0 for source in data.train]
    sizes = np.bincount(samples.sources[:: samples.group], minlength=len(data.train))
    return tempered(sizes.tolist(), data.temperature)


def rows_by_source(samples: Samples, split: Split, data: DataSettings) -> dict[str, PackedRows]:
    """The rows of each source that has samples, by its name."""
    out = {}
    for number, name in enumerate(source_names(split.sources)):
        weights = [float(source == number) for source in range(len(split.sources))]
        own = Epochs(samples, data.max_length, data.packing, data.shuffle_seed, weights)
        if own.draws:
            out[name] = own.of(0)
    return out


def read_split(
    split: Split,
    data: DataSettings,
    how: Coding,
    data_dir: Path,
    tokenising: Tokenising,
) -> tuple[Samples, SplitReport]:
    """The samples that are trained or evaluated on, from the cache where they are in it. They may be none.

    Raises:
        UserError: a source cannot be read, or a row may not be as it is.
    """
    found: tuple[Samples, SplitReport] | None = None
    folder: Path | None = None
    if tokenising.cache is not None:
        named, reason = caching.key(split.sources, data, how, data_dir, split.part)
        if named is not None:
            folder = tokenising.cache / "data" / named
            found = caching.load(folder)
        else:
            caching.say(f"the tokenised data is not kept: {reason}")
    if found is None:
        found = _read(split, data, how, data_dir, tokenising.workers)
        if folder is not None and len(found[0]):
            caching.save(folder, *found)
    samples, report = found
    return (replace(samples, group=2) if data.format == "preference" else samples), report


def _read(
    split: Split, data: DataSettings, how: Coding, data_dir: Path, workers: int | None
) -> tuple[Samples, SplitReport]:
    readers = open_split(split, data, data_dir)
    samples, encoded = tokenise(readers, how, workers, f"tokenising {split.name}")
    report = SplitReport(row_length=data.max_length)
    for reader in readers:
        report.read += reader.read
        report.removed += reader.removed
        report.malformed.merge(reader.malformed)
    report.merge(encoded)
    return samples, report


def count_rows(report: SplitReport, rows: Sequence[PackedRows], samples: Samples) -> None:
    """Notes how full the rows of an epoch are."""
    lengths = samples.lengths.reshape(-1, samples.group).sum(1)
    report.rows = sum(map(len, rows)) * samples.group
    report.row_tokens = sum(int(lengths[one.samples].sum()) for one in rows)


def check_split(name: str, report: SplitReport, data: DataSettings) -> None:
    """Refuses a split of which nothing, or too little, can be used, or of which too much stays unused.

    Args:
        name: of the split.

    Raises:
        UserError
    """
    ratio = data.max_invalid_ratio
    if not report.kept:
        raise UserError(
            f"none of the {report.read} rows of {name} can be used: " + "; ".join(report.notes()[:3]),
            _remedy(report, data),
        )
    if report.invalid > ratio * report.read:
        first = [note for note in report.notes() if ": too long: " not in note][:3]
        raise UserError(
            f"{report.invalid} of {report.read} rows of {name} cannot be used, more than "
            f"data.max_invalid_ratio {ratio:g} allows; the first: " + "; ".join(first),
            _remedy(report, data),
        )
    if report.incomplete.count > ratio * report.read:
        raise UserError(
            f"{report.incomplete.count} of {report.read} rows of {name} hold what the model would not see, "
            f"more than data.max_invalid_ratio {ratio:g} allows: {report.leftover}",
            LEFTOVER,
        )


def _remedy(report: SplitReport, data: DataSettings) -> str:
    """What helps against the commonest reason for leaving rows out."""
    problems = (report.malformed, report.empty, report.inconsistent, report.masked, report.overlong)
    commonest = max(problems, key=lambda p: p.count)
    if commonest is report.overlong:
        return "raise data.max_length, or set data.overlong to truncate"
    if NO_SYSTEM in commonest.first[0].reason:
        return folding(data.format, data.fields)
    if commonest is report.masked and report.masked.first[0].reason.startswith("the chat template"):
        return WRITTEN
    if commonest is report.inconsistent:
        if "token in common" in commonest.first[0].reason:
            return "move the white space at the prompts' ends to the completions' beginnings"
        return (
            "use a chat template with {% generation %} markers around what the assistant writes "
            "(data.chat_template), or data.loss_on: last_assistant"
        )
    return "see the first reasons: repair those rows, or raise data.max_invalid_ratio to go on without them"
