"""What is trained on and what is evaluated on: sources of their own, or two parts of the same rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from runtime.data.sources import Reader, count, open_preferences, open_rows
from runtime.errors import UserError
from runtime.settings import DataSettings, Source


def choose(rows: int, fraction: float, seed: int) -> np.ndarray:
    """bool[rows], True for the rows that are held out.

    They are those that `datasets.Dataset.train_test_split(test_size=fraction, seed=seed)` puts into its part
    "test"; which stand where in the two parts is not taken over.

    Raises:
        UserError: no row is left to train on.
    """
    held_out = np.zeros(rows, bool)
    number = math.ceil(fraction * rows)
    if rows and number == rows:
        raise UserError(
            f"data.eval_fraction {fraction:g} holds out all rows of data.train ({rows})",
            "give a smaller share, or more rows",
        )
    held_out[np.random.default_rng(seed).permutation(rows)[:number]] = True
    return held_out


@dataclass(frozen=True)
class Division:
    """The rows of some sources, put together in order and divided by `choose`.

    A row counts as it stands in its source, up to the source's limit, whatever becomes of it later: rows
    that the transform removes or that are malformed or too long are in one of the parts like any other.
    """

    sources: Sequence[str | Source]
    fraction: float
    seed: int
    data_dir: Path

    @cached_property
    def held_out(self) -> list[np.ndarray]:
        """bool[rows] of each source. The sources are counted when this is first asked for.

        Raises:
            UserError: a source cannot be read, or no row is left to train on.
        """
        whole = [Source(source) if isinstance(source, str) else source for source in self.sources]
        counts = [count(source, self.data_dir) for source in whole]
        chosen = choose(sum(counts), self.fraction, self.seed)
        return np.split(chosen, np.cumsum(counts)[:-1])


@dataclass(frozen=True)
class Split:
    """What is trained on, or what is evaluated on.

    Attributes:
        name: the key of the recipe that it is from.
        sources: what its rows are from.
        division: of the sources' rows in two; None when the split has all of them.
        held_out: which part of a division it has.
    """

    name: str
    sources: Sequence[str | Source]
    division: Division | None = None
    held_out: bool = False

    @property
    def part(self) -> list[float] | None:
        """What decides which rows of its sources it has: None for all."""
        if self.division is None:
            return None
        return [self.division.fraction, self.division.seed, self.held_out]

    def chosen(self) -> list[np.ndarray] | None:
        """bool[rows] of each source, True for the rows that it has; None for all."""
        if self.division is None:
            return None
        return [mask == self.held_out for mask in self.division.held_out]


def splits(data: DataSettings, data_dir: Path) -> tuple[Split, Split | None]:
    """What is trained on, and what is evaluated on, if anything. No source is read yet.

    Raises:
        UserError: the settings contradict one another.
    """
    if data.eval_fraction is None:
        return Split("data.train", data.train), Split("data.eval", data.eval) if data.eval else None
    if data.eval:
        raise UserError(
            "data.eval and data.eval_fraction are both given", "evaluate on one of them, and remove the other"
        )
    division = Division(data.train, data.eval_fraction, data.eval_seed, data_dir)
    return (
        Split("data.train", data.train, division),
        Split("data.eval_fraction", data.train, division, held_out=True),
    )


def open_split(split: Split, data: DataSettings, data_dir: Path) -> Sequence[Reader[Any]]:
    """A reader of each source of a split, giving its rows alone.

    Raises:
        UserError: as for `open_rows`; or the rows cannot be counted where they are divided.
    """
    opened = open_preferences if data.format == "preference" else open_rows
    return opened(split.sources, data, data_dir, split.chosen())
