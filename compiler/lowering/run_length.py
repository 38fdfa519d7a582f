"""Compute how many steps a run has. No other module does.

With `train.steps` the length is exact. With `train.epochs` it follows from the number of rows that the
samples fill. Where the data and its tokenizer are on this machine, the code of train.py counts the rows
(nothing is downloaded, no weights are needed, jax is not imported). Otherwise the length is a range,
estimated from the characters of local files.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from recipec.compiler import catalog, store
from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.at_hand import (
    PACKAGES,
    AtHand,
    PlainTokenizer,
    Subject,
    Unavailable,
    contents,
    look,
)
from recipec.compiler.lowering.first_rows import all_rows
from recipec.compiler.lowering.references import escapes
from recipec.compiler.packages import install, missing_packages
from recipec.compiler.wording import plural
from recipec.runtime.data.file_rows import kind_of
from recipec.runtime.data.tokenizer import load_tokenizer
from recipec.runtime.errors import UserError
from recipec.runtime.settings import TrainSettings

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program
    from recipec.spec.language import Recipe, Source, Train

LARGEST = 64 * 2**20
"""The most bytes of data that are counted while compiling; more would make it slow."""

SAMPLED = 200
"""The number of rows whose lengths are looked at."""

CHARACTERS_PER_TOKEN = 4
"""Characters of a token of English text with a vocabulary of 262,144: a rough value, and only reported as
such."""

FEWEST_CHARACTERS, MOST_CHARACTERS = 2.5, 5.0
"""Characters of a token: the least, for code and other languages, and the most, for plain English."""

FEWEST_MARKERS, MOST_MARKERS = 3, 10
"""Tokens that a chat template adds around a turn."""

SPILL = 1.25
"""The likely upper bound of the rows that packing makes, relative to those of a perfect packing."""

ENOUGH_STEPS = 50
"""Below this number of optimizer steps, a run hardly learns."""

FEW_SAMPLES_EPOCHS, MOST_EPOCHS = 5, 10
"""Passes over the data: for samples so few that no number of passes gives enough steps, and the number from
which on a model overfits."""

QUICK_PACKAGES = ("numpy", "tokenizers", "huggingface_hub")
"""Packages that counting needs without transformers, whose import takes seconds."""

QUICK_BYTES = 4 * 2**20
"""The most bytes of data that are tokenized while a recipe is checked, which takes a second or two."""


@dataclass(frozen=True)
class LocalData:
    """What local data files show.

    Attributes:
        rows: of all files together, up to each source's limit.
        tokens: the likely minimum and maximum of a sample's average tokens; equal if the tokens were counted.
        drawn: rows of an epoch, by the sources' weights.
        sizes: rows of each source.
    """

    rows: int
    tokens: tuple[float, float]
    drawn: int
    sizes: tuple[int, ...]

    @property
    def mean_tokens(self) -> int:
        """The mean of the two values of `tokens`."""
        return round(sum(self.tokens) / 2)

    def lengths(self) -> str:
        """Return "61 tokens on average", or "about 40 to 80 tokens on average, by their characters"."""
        low, high = (max(1, round(number)) for number in self.tokens)
        if low == high:
            return f"{plural(low, 'token')} on average"
        return f"about {low:,} to {high:,} tokens on average, by their characters"


@dataclass(frozen=True)
class Length:
    """The number of optimizer steps of a run.

    Attributes:
        least, steps: the likely minimum and maximum; None when nothing is known.
        bound: the largest possible number.
        exact: whether the run has exactly `steps` steps.
        data: what the training files show; None when they are not all on this machine.
    """

    least: int | None
    steps: int | None
    bound: int | None
    exact: bool
    data: LocalData | None

    def words(self) -> str:
        """Return "11 steps", "about 9 to 16 steps", "at most 62 steps"; "" when nothing is known."""
        if self.steps is None or self.least is None:
            return ""
        if self.exact:
            return plural(self.steps, "step")
        if self.steps == self.bound:
            return f"at most {plural(self.steps, 'step')}"
        least = f"{self.least:,} to " if self.least < self.steps else ""
        return f"about {least}{plural(self.steps, 'step')}"


@dataclass(frozen=True)
class Statistics:
    """The training data of a recipe, tokenized and laid into rows.

    Attributes:
        samples: kept samples; pairs for preferences.
        dropped: rows of the files that are not kept.
        rows: of an epoch, as train.global_batch_size counts them: both answers of a preference are one.
        answers: rows of tokens in each of them: 2 for a preference, else 1.
        tokens: tokens of an epoch, without padding.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    samples: int
    dropped: int
    rows: int
    answers: int
    tokens: int

    @property
    def tokens_per_row(self) -> float:
        """Tokens of a row of max_length without padding, on average."""
        return self.tokens / (self.rows * self.answers)

    def steps(self, train: Train) -> int:
        """Return the optimizer steps of a run, as runtime.data.prepare counts them."""
        return train.steps or _steps_of(train, self.rows)


def run_length(recipe: Recipe, folder: Path) -> Length:
    """Return the length of a recipe's run.

    Args:
        folder: the recipe's folder, which its data paths are relative to.
    """
    train, data = recipe.train, recipe.data
    local = None if any(escapes(source.path) for source in data.train) else read_local(folder, data.train)
    counted = None if local is None or not local.rows else _counted(recipe, folder)
    if local is not None and counted is not None:
        mean = counted.tokens / max(1, counted.samples * counted.answers) if _plain(recipe) else None
        local = replace(local, tokens=(mean, mean) if mean else local.tokens)
    if train.steps is not None:
        return Length(train.steps, train.steps, train.steps, True, local)
    if local is None or local.rows == 0:
        return Length(None, None, None, False, local)
    if counted is not None:
        steps = counted.steps(train)
        return Length(steps, steps, steps, True, local)

    samples = max(1, math.ceil(local.drawn * (1 - held_out(data.eval_fraction, local.rows) / local.rows)))
    if any(data.of(source).overlong == "split" for source in data.train):
        low, high = (samples * tokens / data.max_length for tokens in local.tokens)
        most = math.ceil(high * SPILL) + 1 if data.packing else math.ceil(high) + samples
        return Length(_steps_of(train, max(1, low)), _steps_of(train, most), None, False, local)
    bound = _steps_of(train, samples)
    if not data.packing:
        return Length(bound, bound, bound, False, local)
    low, high = (samples * tokens / data.max_length for tokens in local.tokens)
    most = min(samples, math.ceil(high * SPILL) + 1)
    least = _steps_of(train, max(1, min(low, most)))
    return Length(least, _steps_of(train, most), bound, False, local)


def _steps_of(train: Train, rows: float) -> int:
    """Return the optimizer steps of all epochs for a number of rows."""
    if train.grpo is None:
        return (train.epochs or 1) * math.ceil(rows / train.global_batch_size)
    batches = math.ceil(rows * train.grpo.num_generations / train.global_batch_size)
    return (train.epochs or 1) * batches * train.grpo.iterations


def held_out(fraction: float | None, rows: int) -> int:
    """Return how many of `rows` rows data.eval_fraction holds out, as in runtime.data.sources."""
    return 0 if fraction is None else math.ceil(fraction * rows)


def steps_left(train: Train, steps: int) -> int:
    """Return the steps after train.continue_from of a run that ends at `steps`."""
    return max(0, steps - (train.continue_from or 0))


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """Return the warm-up steps of a run with `steps` steps."""
    schedule = recipe.train.schedule
    if schedule.warmup_ratio is not None:
        return math.ceil(schedule.warmup_ratio * steps_left(recipe.train, steps))
    return schedule.warmup_steps or 0


def _plain(recipe: Recipe) -> bool:
    """Return whether an epoch contains each sample exactly once."""
    return recipe.data.temperature is None and all(source.weight == 1 for source in recipe.data.train)


def _counted(recipe: Recipe, folder: Path) -> Statistics | None:
    """Count the data with its tokenizer, if both are on this machine and counting takes only seconds."""
    model = catalog.known(recipe.model.id, folder)
    if model is None:
        return None
    statistics = quick_statistics(Subject(recipe, folder / "recipe.yaml", model.family, model.architecture))
    return None if isinstance(statistics, Unavailable) or not statistics.samples else statistics


def read_local(folder: Path, sources: Sequence[Source]) -> LocalData | None:
    """Count the rows of local files.

    Returns:
        None if one is elsewhere, missing, broken or too large, or if this environment cannot read its
        format.
    """
    sizes, drawn, size = [], 0, 0
    lengths: list[tuple[int, int]] = []
    for source in sources:
        file = folder / source.path
        if "://" in source.path or kind_of(source.path) is None:
            return None
        try:
            size += file.stat().st_size
            if size > LARGEST or not file.is_file():
                return None
            counted = _counted_rows(file, source.limit)
        except (OSError, EOFError, ValueError, RecursionError, csv.Error):
            return None
        if counted is None:
            return None
        sizes.append(counted[0])
        drawn += math.ceil(source.weight * counted[0])
        lengths += counted[1]
    count = max(1, len(lengths))
    characters, turns = (
        sum(numbers) / count for numbers in (zip(*lengths, strict=True) if lengths else ([], []))
    )
    low = characters / MOST_CHARACTERS + turns * FEWEST_MARKERS
    high = characters / FEWEST_CHARACTERS + turns * MOST_MARKERS
    return LocalData(sum(sizes), (low, high), drawn, tuple(sizes))


def _counted_rows(file: Path, limit: int | None) -> tuple[int, list[tuple[int, int]]] | None:
    """Return the rows of a file, and the sizes of its first ones; None for a format that is not read here."""
    if file.name.endswith(".jsonl"):  # counted without parsing
        lines = [line for line in file.read_bytes().splitlines() if line.strip()][:limit]
        return len(lines), [_size(line) for line in lines[:SAMPLED]]
    rows = all_rows(file, LARGEST)
    if rows is None:
        return None
    count, sizes = 0, []
    for row in islice(rows, limit):
        count += 1
        if count <= SAMPLED:
            sizes.append((_text_length(row), _turns(row)))
    return count, sizes


def _size(line: bytes) -> tuple[int, int]:
    """Return the characters of the texts in one row, and the number of turns that a chat template would
    write."""
    try:
        row = json.loads(line)
        return _text_length(row), _turns(row)
    except (ValueError, RecursionError):
        return 0, 0


def _turns(row: Any) -> int:
    if not isinstance(row, dict):
        return 0
    return sum(len(value) for value in row.values() if isinstance(value, list)) or 2 * ("instruction" in row)


def _text_length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_text_length(item) for item in value.values())
    if isinstance(value, list):
        return sum(_text_length(item) for item in value)
    return 0


STATISTICS: TypeAdapter[Statistics] = TypeAdapter(Statistics)


def statistics(
    program: Program, model: Path | None = None, data_dir: Path | None = None
) -> Statistics | Unavailable:
    """Count the training data of a recipe. This takes as long as tokenizing, unless plans keep the result.

    Args:
        model, data_dir: as for `at_hand.look`.

    Raises:
        ArtifactError: a given folder does not exist, or train.py would refuse the data.
    """
    if missing := _missing(PACKAGES):
        return missing
    inputs = look(program, model, data_dir)
    if isinstance(inputs, Unavailable):
        return inputs

    def load() -> Any:
        return load_tokenizer(inputs.model_dir, inputs.model, inputs.data, inputs.data_dir)

    if inputs.data.images is not None:  # the names of the pictures stand in the rows
        return _count(inputs, load)
    key = store.key("statistics", contents(inputs))
    return _kept(key) or _tokenized(inputs, load, key)


def quick_statistics(program: Program | Subject) -> Statistics | Unavailable:
    """Count as `statistics` does, if it takes at most a second or two and runs none of the recipe's code.

    Results that `statistics` kept are used as well.
    """
    if missing := _missing(QUICK_PACKAGES):
        return missing
    if program.recipe.data.images is not None:
        return Unavailable("its pictures are read and decoded to count their tokens")
    if program.recipe.data.transforms:
        return Unavailable("data.transform is a program, which is not run to count")
    try:
        inputs = look(program, None, None)
        if isinstance(inputs, Unavailable):
            return inputs
        digest = contents(inputs)
        kept = _kept(store.key("statistics", digest))
        if kept is not None:
            return kept
        files = [inputs.data_dir / source.path for source in program.recipe.data.train]
        if not all(file.is_file() for file in files) or sum(f.stat().st_size for f in files) > QUICK_BYTES:
            return Unavailable(f"the data is more than {QUICK_BYTES >> 20} MiB")
        key = store.key("quick statistics", digest)
        tokenizer = Path(inputs.model.tokenizer) if inputs.model.tokenizer else inputs.model_dir
        return _kept(key) or _tokenized(inputs, lambda: PlainTokenizer(tokenizer), key)
    except (ArtifactError, OSError, ValueError, KeyError, TypeError, AttributeError):
        return Unavailable("the data or the tokenizer cannot be read")  # the code that uses them reports why


def _missing(packages: tuple[str, ...]) -> Unavailable | None:
    missing = missing_packages(packages)
    if not missing:
        return None
    return Unavailable(f"{', '.join(missing)} cannot be imported ({install('train', 'plan')})")


def _kept(key: str) -> Statistics | None:
    kept = store.get(key)
    with suppress(ValidationError):  # an unreadable entry is counted again
        return None if kept is None else STATISTICS.validate_json(kept)
    return None


def _tokenized(inputs: AtHand, load: Callable[[], Any], key: str) -> Statistics:
    counted = _count(inputs, load)
    store.put(key, STATISTICS.dump_json(counted).decode())
    return counted


def _count(inputs: AtHand, load: Callable[[], Any]) -> Statistics:
    """Tokenize and pack the data as train.py does."""
    from recipec.runtime.data.prepare import Tokenizing, prepare

    # Batches of one row: the batch size does not matter for counting.
    alone = TrainSettings(epochs=1, global_batch_size=1, micro_batch_size=1)
    try:
        reading = Tokenizing(model_dir=inputs.model_dir)
        prepared = prepare(inputs.data, alone, 1, load(), inputs.data_dir, inputs.vocabulary, reading)
    except UserError as error:
        raise ArtifactError(error.message, error.help) from error
    report, answers = prepared.report.train, prepared.samples.group
    samples = len(prepared.samples) // answers
    return Statistics(
        samples=samples,
        dropped=report.read - report.kept,
        rows=prepared.steps_per_epoch or 0,
        answers=answers,
        tokens=report.row_tokens,
    )
