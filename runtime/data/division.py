"""Divide the rows of sources in two, for training and for evaluation (data.eval_fraction)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ..errors import UserError
from ..settings import Source
from .counting import count_rows
from .files import located


def choose(rows: int, fraction: float, seed: int) -> np.ndarray:
    """Return bool[rows], True for the rows that are held out.

    They are the rows that `datasets.Dataset.train_test_split(test_size=fraction, seed=seed)` puts into its
    part "test". The order of rows within the two parts is not copied.

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
    """The rows of some sources, concatenated in order and divided by `choose`.

    A row counts as it is in its source, up to the source's limit, even if it is not used later: rows that the
    transform removes, malformed rows and overlong rows belong to one of the parts like any other row.
    """

    sources: Sequence[str | Source]
    fraction: float
    seed: int
    data_dir: Path

    @cached_property
    def held_out(self) -> list[np.ndarray]:
        """Return bool[rows] of each source. The first use counts the sources' rows.

        Raises:
            UserError: a source cannot be read, or no row is left to train on.
        """
        whole = [Source(source) if isinstance(source, str) else source for source in self.sources]
        counts = [count(source, self.data_dir) for source in whole]
        chosen = choose(sum(counts), self.fraction, self.seed)
        return np.split(chosen, np.cumsum(counts)[:-1])


def count(source: Source, data_dir: Path) -> int:
    """Count the rows that `records` gives. Data sets of the hub, saved ones and Parquet files state their
    count; other sources are read.

    Raises:
        UserError: as for `records`.
    """
    place, is_folder = located(source, data_dir)
    if place is not None and not is_folder:
        rows = count_rows(place, source.limit)
    else:
        from . import huggingface

        rows = huggingface.hub_rows(source) if place is None else huggingface.folder_rows(place, source.split)
    return rows if source.limit is None else min(rows, source.limit)
