"""How long a run is, as far as that can be told before its data is tokenised.

With `train.steps` it is exact. With `train.epochs` it follows from the rows that are kept, which the
runtime counts when it starts; from local files an upper bound is counted here, since rows can only be
dropped or packed together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spec.language import DataSource, Recipe

LARGEST = 64 * 2**20
"""Bytes of data that are counted while compiling; more would make it slow."""

SAMPLED = 200
"""Rows whose lengths are looked at."""

CHARACTERS_PER_TOKEN = 4
"""Of English text under a vocabulary of 262,144: rough, and only said as such."""


@dataclass(frozen=True)
class LocalData:
    """What local JSON-lines files show without a tokenizer.

    Attributes:
        rows: of all files together, up to each source's limit.
        mean_tokens: a rough mean length of the first rows in tokens.
    """

    rows: int
    mean_tokens: int


@dataclass(frozen=True)
class Length:
    """Optimizer steps of a run.

    Attributes:
        steps: exact, or the most that are possible; None when nothing is known.
        exact: whether `steps` is what will be run.
        data: what the training files show; None when they are not all at hand.
    """

    steps: int | None
    exact: bool
    data: LocalData | None


def run_length(recipe: Recipe, folder: Path) -> Length:
    """The length of a recipe's run.

    Args:
        folder: of the recipe: its relative data paths start there.
    """
    data = read_local(folder, recipe.data.train)
    if recipe.train.steps is not None:
        return Length(recipe.train.steps, True, data)
    if data is None or data.rows == 0:
        return Length(None, False, data)
    rows = data.rows - held_out(recipe.data.eval_fraction, data.rows)
    per_epoch = math.ceil(rows / recipe.train.global_batch_size)
    return Length(per_epoch * (recipe.train.epochs or 1), False, data)


def held_out(fraction: float | None, rows: int) -> int:
    """How many of so many rows data.eval_fraction holds out, as in runtime.data.splits."""
    return 0 if fraction is None else math.ceil(fraction * rows)


def warmup_steps(recipe: Recipe, steps: int) -> int:
    """Steps of the warm-up in a run of so many steps."""
    schedule = recipe.train.schedule
    if schedule.warmup_ratio is not None:
        return math.ceil(schedule.warmup_ratio * steps)
    return schedule.warmup_steps or 0


def read_local(folder: Path, sources: Sequence[DataSource]) -> LocalData | None:
    """Counts the rows of local JSON-lines files; None when one is elsewhere, missing or large."""
    rows, lengths, size = 0, [], 0
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
        lengths += [_characters(line) for line in lines[:SAMPLED]]
    mean = sum(lengths) / len(lengths) / CHARACTERS_PER_TOKEN if lengths else 0
    return LocalData(rows, round(mean))


def _characters(line: bytes) -> int:
    """Characters of the texts in one row."""
    try:
        return _text_length(json.loads(line))
    except (ValueError, RecursionError):
        return 0


def _text_length(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(_text_length(item) for item in value.values())
    if isinstance(value, list):
        return sum(_text_length(item) for item in value)
    return 0
