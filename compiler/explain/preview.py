"""`recipe preview`: show what a recipe makes of its data, before anything is trained.

The data is tokenized as in train.py. The weights are not needed, and jax is not imported.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.catalog import folder_of, is_directory
from recipec.compiler.explain.preview_rewards import RewardPreview, sampled, scored
from recipec.compiler.lowering.at_hand import PACKAGES, TOKENIZER_FILES, TOKENIZERS
from recipec.compiler.lowering.runtime_settings import choosing, data_settings, model_settings
from recipec.compiler.packages import require_packages
from recipec.compiler.pages.document import Block, Document, Gallery, Items, Picture, Section, Text
from recipec.runtime.data.advice import check_split
from recipec.runtime.data.formats import PreferencePair
from recipec.runtime.data.pictures import content_of, decoded, kept_pictures, opened
from recipec.runtime.data.row_counts import evaluation_warning
from recipec.runtime.data.tokenizer import chat_templates, load_tokenizer
from recipec.runtime.errors import UserError, first_line

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.runtime.data.encoding import Encoder, Shown
    from recipec.runtime.data.epochs import Epochs
    from recipec.runtime.data.formats import ParsedSample
    from recipec.runtime.data.image_processor import ImageProcessor, ImageSettings
    from recipec.runtime.data.row_counts import SplitReport
    from recipec.runtime.data.samples import Samples
    from recipec.runtime.data.sources import Reader, Split
    from recipec.runtime.settings import DataSettings, ModelSettings

BARS = 12
BAR_WIDTH = 40

BRACKETS = (("⟦", "⟧"), ("⦃", "⦄"), ("⟪", "⟫"), ("<<<", ">>>"), ("<<<<<<", ">>>>>>"))
"""Brackets around targets in plain text: the first pair that does not occur in the shown samples is used."""


@dataclass(frozen=True)
class Bar:
    """The number of kept samples with lengths from `first` to `last` tokens."""

    first: int
    last: int
    count: int


@dataclass(frozen=True)
class Preview:
    """The result for a split.

    Attributes:
        name: of the recipe.
        split: "train" or "eval".
        shown: the first samples, as they are trained on.
        report: the report on the whole split.
        lengths: a histogram of the kept samples by their length in tokens.
        packing: whether samples share rows.
        draws: samples of an epoch. This differs from the number of kept samples if sources have weights.
        steps_per_epoch: optimizer steps of one pass; 0 for eval.
        problem: why train.py would refuse the split, and what to do; None when it would not.
        rewards: the scores of given completions; None without any.
        learns: whether samples have tokens that carry loss; prompts have none.
        notes: on samples that are also in other sources or in the other split, and on sources without draws.
        thumbnails: of the pictures of each shown sample as the model sees them, as data: addresses.
        window: for a stream, the number of samples that were read from the start of each source; None when
            all were read.
    """

    name: str
    split: str
    shown: list[Shown]
    report: SplitReport
    lengths: list[Bar]
    packing: bool
    draws: int
    steps_per_epoch: int
    problem: tuple[str, str | None] | None
    window: int | None = None
    notes: tuple[str, ...] = ()
    rewards: RewardPreview | None = None
    learns: bool = True
    thumbnails: tuple[tuple[str, ...], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the preview as JSON values."""
        return {
            "recipe": self.name,
            "split": self.split,
            "samples": [
                {
                    **asdict(sample),
                    "pieces": [{"text": text, "target": target} for text, target in sample.pieces],
                }
                for sample in self.shown
            ],
            "lengths": [asdict(bar) for bar in self.lengths],
            "packing": self.packing,
            "draws": self.draws,
            "steps_per_epoch": self.steps_per_epoch,
            "report": self.report.to_dict(),
            "notes": list(self.notes),
            **({} if self.rewards is None else {"rewards": asdict(self.rewards)}),
            "problem": self.problem[0] if self.problem else None,
        }


def preview(
    program: Program,
    count: int,
    split: str,
    model: Path | None = None,
    data_dir: Path | None = None,
    completions: str | int | None = None,
    thumbnails: bool = False,
) -> Preview:
    """Tokenize a split of a recipe's data, and score completions with its rewards.

    Args:
        count: the number of samples to show.
        split: "train" or "eval".
        model: folder of the checkpoint or of its tokenizer; None finds the recipe's own.
        data_dir: the folder that relative paths of data start from; None for the recipe's folder.
        completions: the place of given completions, as for `preview_rewards.scored`; or the number of prompts
            that the model of the folder completes; None for no completions.
        thumbnails: whether to make pictures of the pictures.

    Raises:
        ArtifactError: the packages that tokenize are not installed.
        runtime.errors.UserError: the tokenizer or the data cannot be read.
    """
    require_packages("previewing", PACKAGES)
    from recipec.runtime.data.batches import rows_by_source
    from recipec.runtime.data.encoding import Encoder, coding, of_prompts
    from recipec.runtime.data.epochs import Epochs, check_draws, measure_rows, room_of, source_weights
    from recipec.runtime.data.image_processor import image_processor, load_image_settings
    from recipec.runtime.data.sources import splits
    from recipec.runtime.data.workers import tokenize

    folder = data_dir or program.source.parent
    data = data_settings(program.recipe, program.source.parent)
    settings = model_settings(program.recipe, program.family)
    # A folder with only a tokenizer has no config.json, which names the rows.
    settings = replace(settings, vocab_size=program.architecture.vocab_size)
    part = splits(data, folder)[split != "train"]
    if part is None:
        raise UserError(
            f"{program.name} has no data.eval", "name its sources in the recipe, or give data.eval_fraction"
        )
    rewarded = program.recipe.train.grpo is not None
    option = "--sample" if isinstance(completions, int) else "--completions"
    if completions is not None and not rewarded:
        raise UserError(
            f"{option}: {program.name} has no rewards", "it is for recipes with train.objective grpo"
        )
    if isinstance(completions, int):
        require_packages("sampling", ("jax", "tunix"))
    window = data.stream_window if split == "train" else None
    model_dir = _tokenizer_folder(program, settings, model)
    tokenizer = load_tokenizer(model_dir, settings, data, folder)
    images = None
    if data.images is not None:
        require_packages("previewing", ("PIL",))
        images = load_image_settings(model_dir, tokenizer, data.images, kept_pictures(None))
    templates = chat_templates(tokenizer, data, folder, part.sources)
    how = coding(tokenizer, templates, data, program.architecture.vocab_size, part.sources, images)
    how = of_prompts(how, program.recipe.train)

    encoder = Encoder(how)
    sources = [_shown(encoder, *source) for source in enumerate(_readers(part, data, folder))]
    in_turn = (sample for turn in zip_longest(*sources) for sample in turn if sample is not None)
    shown = list(islice(in_turn, count))

    samples, report = tokenize(_readers(part, data, folder), how, data, None, f"tokenizing {part.name}")
    draws = steps = 0
    if len(samples):
        counted = split == "train" and window is None
        weights = source_weights(samples, data) if counted else [1.0] * len(part.sources)
        room = None if images is None else room_of(samples, None, data, image_processor(images).unit)
        epochs = Epochs(samples, data.max_length, data.packing, data.shuffle_seed, weights, room)
        rows_of = (
            {"": epochs.of(0)} if split == "train" else rows_by_source(samples, part.sources, data, room)
        )
        if not rewarded:  # a row is a prompt with its completion then
            measure_rows(report, list(rows_of.values()), samples, room)
        draws = epochs.draws
        if counted:
            steps = math.ceil(len(epochs.of(0)) / program.recipe.train.global_batch_size)
            if (grpo := program.recipe.train.grpo) is not None:
                prompts = program.recipe.train.global_batch_size // grpo.num_generations
                steps = math.ceil(len(epochs.of(0)) / prompts) * grpo.iterations
    problem = None
    try:
        check_split(part.name, report, data)
        if split == "train":
            check_draws(draws, report.samples)
    except UserError as error:
        problem = error.message, error.help
    lengths = histogram(samples.lengths.tolist())
    notes = _twice(samples, data, part, epochs) if split == "train" and len(samples) else []
    notes += _trained_on(samples, program, data, folder, tokenizer, split, images) if len(samples) else []
    scores = None
    if isinstance(completions, str):
        scores = scored(program, completions, tokenizer, folder)
    elif completions is not None and len(samples):
        scores = sampled(program, samples, completions, model_dir, sorted(map(int, report.ends)))
    elif rewarded:
        notes.append(
            "the rewards were not run: --completions names a column or a file with completions to score, and "
            "--sample N lets the model of --model complete N prompts"
        )
    return Preview(
        *(program.name, split, shown, report, lengths, data.packing, draws, steps, problem, window),
        tuple(notes),
        scores,
        not rewarded,
        tuple(_thumbnails(image_processor(images), sample) for sample in shown)
        if thumbnails and images is not None
        else (),
    )


THUMBNAIL = 320
"""The most pixels of a thumbnail's side."""


def _thumbnails(processor: ImageProcessor, sample: Shown) -> tuple[str, ...]:
    """Return the pictures of a sample as the model sees them, as data: addresses."""
    from PIL import Image

    out = []
    for picture in sample.pictures:
        what = f"picture {picture.number}"
        content = content_of(picture.place, Path(processor.settings.kept), what)
        image = decoded(opened(content, what)[0], what, processor.limits)
        seen = Image.fromarray(processor.shown(processor.of_image(image, picture.grid), picture.grid))
        seen.thumbnail((THUMBNAIL, THUMBNAIL))
        buffer = io.BytesIO()
        seen.save(buffer, "PNG")
        out.append(f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return tuple(out)


def page(preview: Preview) -> Document:
    """Return the preview as a page: each sample with its pictures as the model sees them."""
    sections = []
    for number, sample in enumerate(preview.shown):
        sources = preview.thumbnails[number] if preview.thumbnails else ()
        gallery = [Picture(source, str(p)) for source, p in zip(sources, sample.pictures, strict=False)]
        before, after = BRACKETS[0]
        body = "".join(f"{before}{text}{after}" if target else text for text, target in sample.pieces)
        blocks: list[Block] = [Gallery(gallery)] if gallery else []
        loss = f", {sample.targets:,} carry loss: they stand in {before} {after}" if preview.learns else ""
        blocks += [Text(f"{sample.tokens:,} tokens{loss}."), Text(body, "code")]
        if sample.columns:
            blocks.append(Items(_columns(sample)))
        sections.append(Section(f"sample-{number}", sample.origin, (), blocks))
    report = preview.report
    counts: list[Block] = [Text(report.sentence(preview.split)), Items([*report.notes(), *preview.notes])]
    sections.append(Section("data", "The data", (), counts))
    return Document(
        preview.name,
        sections,
        title=f"{preview.name}: preview",
        generator="recipec preview",
        command=("recipe preview", preview.split),
    )


def _twice(samples: Samples, data: DataSettings, part: Split, epochs: Epochs) -> list[str]:
    """Return notes on samples of several sources, and on sources that no epoch draws."""
    from recipec.runtime.data.epochs import source_weights, undrawn
    from recipec.runtime.data.samples import repeated_notes

    if len(part.sources) == 1:
        return []
    notes = repeated_notes(data.train, samples)
    if data.stream_window is None:
        notes += undrawn(part.sources, source_weights(samples, data), samples, epochs.of(0).samples)
    return notes


def _trained_on(
    samples: Samples,
    program: Program,
    data: DataSettings,
    folder: Path,
    tokenizer: Any,
    split: str,
    images: ImageSettings | None = None,
) -> list[str]:
    """Return what to say of evaluation samples that are trained on; the other split is tokenized for it."""
    from recipec.runtime.data.encoding import coding, of_prompts
    from recipec.runtime.data.sources import splits
    from recipec.runtime.data.workers import tokenize

    other = splits(data, folder)[split == "train"]
    if other is None:
        return []
    try:
        templates = chat_templates(tokenizer, data, folder, other.sources)
        how = coding(tokenizer, templates, data, program.architecture.vocab_size, other.sources, images)
        how = of_prompts(how, program.recipe.train)
        others, _ = tokenize(_readers(other, data, folder), how, data, None, f"tokenizing {other.name}")
    except UserError as error:
        return [f"{other.name} is not compared with {split}: {error.message}"]
    held, trained = (others, samples) if split == "train" else (samples, others)
    window = "the beginning of the stream" if data.stream_window is not None else ""
    count, chooses = held.shared_with(trained), choosing(program.recipe)
    warning = evaluation_warning(count, len(held.fingerprints), chooses, window)
    return [f"warning: {warning}"] if warning else []


def _shown(encoder: Encoder, source: int, reader: Reader) -> Iterator[Shown]:
    """Yield the samples of a source that are trained on."""
    from recipec.runtime.data.encoding import show

    return (sample for row in _rows(reader) for sample in show(encoder, row, source))


def histogram(lengths: Sequence[int]) -> list[Bar]:
    """Return at most BARS bars of equal width, a power of two, from the shortest to the longest sample."""
    if not lengths:
        return []
    width = 1
    while (max(lengths) - 1) // width - (min(lengths) - 1) // width >= BARS:
        width *= 2
    first, last = (min(lengths) - 1) // width, (max(lengths) - 1) // width
    counts = [0] * (last - first + 1)
    for length in lengths:
        counts[(length - 1) // width - first] += 1
    return [Bar((first + i) * width + 1, (first + i + 1) * width, n) for i, n in enumerate(counts)]


def text(preview: Preview, color: bool) -> str:
    """Format the preview for people: with ANSI colors, or with brackets around the targets."""
    report = preview.report
    everything = "".join(piece for sample in preview.shown for piece, _ in sample.pieces)
    before, after = next(
        (pair for pair in BRACKETS if not any(mark in everything for mark in pair)), BRACKETS[-1]
    )
    if color:
        before, after = "\x1b[1;32m", "\x1b[0m"
    lines = []
    if preview.shown and preview.learns:
        how = "are green" if color else f"stand in {before} {after}"
        lines += [f"Tokens that carry loss {how}.", ""]
    for sample in preview.shown:
        cut = ", cut" if sample.truncated else ""
        carry = f", {sample.targets:,} carry loss" if preview.learns else ""
        lines.append(f"--- {_visible(sample.origin)}: {sample.tokens:,} tokens{carry}{cut}")
        body = "".join(
            f"{before}{_visible(piece)}{after}" if target else _visible(piece)
            for piece, target in sample.pieces
        )
        lines += [body.rstrip("\n") if body.endswith("\n") else body, *map(_visible, _columns(sample)), ""]
    if preview.lengths:
        lines += ["lengths of the samples, in tokens", *_bars(preview.lengths), ""]
    lines.append(report.sentence(preview.split))
    lines += [f"  {_visible(note)}" for note in report.notes()]
    if report.rows and preview.learns:
        lines.append(_fullness(preview))
    lines += [_visible(note) for note in preview.notes]
    if preview.rewards is not None:
        lines += map(_visible, preview.rewards.lines())
    if preview.window is not None:
        lines.append(f"of a stream: the first {preview.window:,} samples of each source were read")
    if preview.steps_per_epoch:
        lines.append(f"steps: {preview.steps_per_epoch:,} an epoch")
    return "\n".join(lines) + "\n"


def _columns(sample: Shown) -> list[str]:
    """Return a line for each column that the rewards of a prompt can read."""
    return [
        f"for rewards, {name}: {json.dumps(value, ensure_ascii=False)}"
        for name, value in sample.columns.items()
    ]


def _fullness(preview: Preview) -> str:
    report, draws = preview.report, preview.draws
    if not preview.packing:
        return f"not packed: {report.rows:,} rows of one sample, {100 * report.efficiency:.1f} % full"
    alone = report.row_tokens / (draws * report.row_length)
    return (
        f"packing: {draws:,} samples in {report.rows:,} rows, {100 * report.efficiency:.1f} % full; "
        f"one sample a row would be {100 * alone:.1f} % full"
    )


def _bars(bars: Sequence[Bar]) -> Iterator[str]:
    most = max(bar.count for bar in bars)
    digits = max(len(f"{bar.last:,}") for bar in bars)
    for bar in bars:
        length = math.ceil(BAR_WIDTH * bar.count / most)
        drawn = f"{'#' * length} " if length else ""
        yield f"  {bar.first:>{digits},} to {bar.last:>{digits},}  {drawn}{bar.count:,}"


def _visible(piece: str) -> str:
    """Return text without characters that could control the terminal."""
    return "".join(char if char in "\n\t" or char.isprintable() else f"\\x{ord(char):02x}" for char in piece)


def _rows(reader: Any) -> Iterator[ParsedSample]:
    """Yield the rows of a source; for a preference, both answers, each as a prompt and its completion."""
    for row in reader:
        if isinstance(row, PreferencePair):
            for name, answer in zip(("chosen", "rejected"), row.answers(), strict=True):
                yield replace(answer, origin=f"{row.origin} {name}")
        elif row.liked is not None:
            yield replace(row, origin=f"{row.origin} {'desirable' if row.liked else 'undesirable'}")
        else:
            yield row


def _readers(split: Split, data: DataSettings, folder: Path) -> Sequence[Reader]:
    from recipec.runtime.data.sources import open_rows

    readers = open_rows(split.sources, data, folder, split.chosen())
    if data.stream_window is not None and split.sources == data.train:
        from recipec.runtime.data.stream import beginning

        for reader in readers:
            reader.records = partial(beginning, reader.source, folder, data.stream_window)
    return readers


def _tokenizer_folder(program: Program, settings: ModelSettings, named_folder: Path | None) -> Path:
    """Return the folder with the model's tokenizer. For a model on the hub, its few files are downloaded."""
    if named_folder is None and not is_directory(settings.id) and "://" not in settings.id:
        brought = folder_of(settings.id, program.source.parent)
        if brought is not None and any((brought / name).is_file() for name in TOKENIZERS):
            return brought
        return _download(settings.id, settings.revision)
    if named_folder is None and "://" in settings.id:
        raise UserError(
            f"{settings.id}: a preview does not read from a bucket", "copy its tokenizer and give --model DIR"
        )
    folder = named_folder or program.source.parent / Path(settings.id).expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder", "--model DIR names the folder of the tokenizer")
    return folder


def _download(repository: str, revision: str | None) -> Path:
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                repository, revision=revision, allow_patterns=list(TOKENIZER_FILES)
            )
        )
    except Exception as error:  # the hub, the network and the disk each raise their own errors
        raise UserError(
            f"{repository}: its tokenizer could not be downloaded ({first_line(error)})",
            "check the connection, or HF_TOKEN for a model with terms; or give a folder with its tokenizer: "
            "--model DIR",
        ) from error
