"""How long a run is: the one place that tells it.

With `train.steps` it is exact. With `train.epochs` it follows from the rows that samples are laid into:
counted where the data and its tokenizer are at hand, else a range by the characters of local JSON-lines
files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.lowering import catalog
from recipec.compiler.lowering.sources import escapes
from recipec.compiler.plan.at_hand import Unavailable
from recipec.compiler.plan.counted import Statistics, quick_statistics
from recipec.compiler.wording import plural
from recipec.runtime.model.families import Architecture, Family, UnsupportedCheckpoint

if TYPE_CHECKING:
    from recipec.spec.language import DataSource, Recipe

LARGEST = 64 * 2**20
"""Bytes of data that are counted while compiling; more would make it slow."""

SAMPLED = 200
"""Rows whose lengths are looked at."""

CHARACTERS_PER_TOKEN = 4
"""Of English text under a vocabulary of 262,144: rough, and only said as such."""

FEWEST_CHARACTERS, MOST_CHARACTERS = 2.5, 5.0
"""Characters of a token, from code and other languages to plain English."""

FEWEST_MARKERS, MOST_MARKERS = 3, 10
"""Tokens that a chat template writes around a turn."""

SPILL = 1.25
"""Rows that packing makes, over those that a perfect one would, at the most that is likely."""

ENOUGH_STEPS = 50
"""Optimizer steps below which a run hardly learns."""


@dataclass(frozen=True)
class LocalData:
    """What local JSON-lines files show.

    Attributes:
        rows: of all files together, up to each source's limit.
        tokens: of a sample, on average: the least and the most that are likely; the same twice when counted.
        drawn: rows of an epoch, by the sources' weights.
    """

    rows: int
    tokens: tuple[float, float]
    drawn: int

    @property
    def mean_tokens(self) -> int:
        """The middle of the two."""
        return round(sum(self.tokens) / 2)

    def lengths(self) -> str:
        """ "61 tokens on average", or "about 40 to 80 tokens on average, by their characters"."""
        low, high = (max(1, round(number)) for number in self.tokens)
        if low == high:
            return f"{plural(low, 'token')} on average"
        return f"about {low:,} to {high:,} tokens on average, by their characters"


@dataclass(frozen=True)
class Length:
    """Optimizer steps of a run.

    Attributes:
        least, steps: the least and the most that are likely; None when nothing is known.
        bound: the most that are possible.
        exact: whether `steps` is what will be run.
        data: what the training files show; None when they are not all at hand.
    """

    least: int | None
    steps: int | None
    bound: int | None
    exact: bool
    data: LocalData | None

    def words(self) -> str:
        """ "11 steps", "about 9 to 16 steps", "at most 62 steps"; "" when nothing is known."""
        if self.steps is None or self.least is None:
            return ""
        if self.exact:
            return plural(self.steps, "step")
        if self.steps == self.bound:
            return f"at most {plural(self.steps, 'step')}"
        least = f"{self.least:,} to " if self.least < self.steps else ""
        return f"about {least}{plural(self.steps, 'step')}"


@dataclass(frozen=True)
class _Subject:
    """A recipe with its model."""

    recipe: Recipe
    source: Path
    family: Family
    architecture: Architecture


def run_length(recipe: Recipe, folder: Path) -> Length:
    """The length of a recipe's run.

    Args:
        folder: of the recipe: its relative data paths start there.
    """
    train, data = recipe.train, recipe.data
    found = None if any(escapes(source.path) for source in data.train) else read_local(folder, data.train)
    counted = None if found is None or not found.rows else _counted(recipe, folder)
    if found is not None and counted is not None:
        mean = counted.tokens / max(1, counted.samples * counted.answers) if _plain(recipe) else None
        found = LocalData(found.rows, (mean, mean) if mean else found.tokens, found.drawn)
    if train.steps is not None:
        return Length(train.steps, train.steps, train.steps, True, found)
    if found is None or found.rows == 0:
        return Length(None, None, None, False, found)
    if counted is not None:
        steps = counted.steps(train)
        return Length(steps, steps, steps, True, found)

    def steps_of(rows: float) -> int:
        return (train.epochs or 1) * math.ceil(rows / train.global_batch_size)

    samples = max(1, math.ceil(found.drawn * (1 - held_out(data.eval_fraction, found.rows) / found.rows)))
    if not data.packing:
        return Length(steps_of(samples), steps_of(samples), steps_of(samples), False, found)
    low, high = (samples * tokens / data.max_length for tokens in found.tokens)
    most = min(samples, math.ceil(high * SPILL) + 1)
    return Length(steps_of(max(1, min(low, most))), steps_of(most), steps_of(samples), False, found)


def _plain(recipe: Recipe) -> bool:
    """Whether an epoch's tokens are those of all samples, once."""
    return all(source.weight == 1 for source in recipe.data.train)


def _counted(recipe: Recipe, folder: Path) -> Statistics | None:
    """What the tokenizer makes of the data, where it is at hand and counting takes no more than seconds."""
    try:
        model = catalog.find(recipe.model.id, folder)
    except (catalog.UnknownModel, UnsupportedCheckpoint):
        return None
    found = quick_statistics(_Subject(recipe, folder / "recipe.yaml", model.family, model.architecture))
    return None if isinstance(found, Unavailable) or not found.samples else found


def held_out(fraction: float | None, rows: int) -> int:
    """How many of so many rows data.eval_fraction holds out, as in runtime.data.sources."""
    return 0 if fraction is None else math.ceil(fraction * rows)


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """Steps of the warm-up in a run of so many steps."""
    schedule = recipe.train.schedule
    if schedule.warmup_ratio is not None:
        return math.ceil(schedule.warmup_ratio * steps)
    return schedule.warmup_steps or 0


def read_local(folder: Path, sources: Sequence[DataSource]) -> LocalData | None:
    """Counts the rows of local JSON-lines files; None when one is elsewhere, missing or large."""
    rows, drawn, size = 0, 0, 0
    lengths: list[tuple[int, int]] = []
    for source in sources:
        file = folder / source.path
        if "://" in source.path or not source.path.endswith(".jsonl"):
            return None
        try:
            size += file.stat().st_size
            if size > LARGEST or not file.is_file():
                return None
            content = file.read_bytes()
        except (OSError, ValueError):
            return None
        lines = [line for line in content.splitlines() if line.strip()][: source.limit]
        rows += len(lines)
        drawn += math.ceil(source.weight * len(lines))
        lengths += [_size(line) for line in lines[:SAMPLED]]
    count = max(1, len(lengths))
    characters, turns = (
        sum(numbers) / count for numbers in (zip(*lengths, strict=True) if lengths else ([], []))
    )
    low = characters / MOST_CHARACTERS + turns * FEWEST_MARKERS
    high = characters / FEWEST_CHARACTERS + turns * MOST_MARKERS
    return LocalData(rows, (low, high), drawn)


def _size(line: bytes) -> tuple[int, int]:
    """Characters of the texts in one row, and the turns that a chat template would write."""
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
