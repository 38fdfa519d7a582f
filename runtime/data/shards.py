"""Split a source into shards, which a stream reads in order, each from the position of an earlier run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError
from ..settings import Source
from .cache import say
from .files import located, read_file
from .places import TOLD, DataPath, explained, kind_of
from .text_files import Record, marked_lines

Mark = Sequence[int]
"""How much of a shard was read: its rows, or for JSON lines its lines and bytes; empty at its beginning."""


@dataclass(frozen=True)
class Shard:
    """A file, or another part of a source that is read like one.

    Attributes:
        about: its name and an identification of its content, as JSON values.
        rows: yields the rows after a mark, each with the mark after it.
    """

    about: Sequence[Any]
    rows: Callable[[Mark], Iterator[tuple[Record, Mark]]]


def shards_of(source: Source, data_dir: Path) -> list[Shard]:
    """Return the shards of a source, in the order of their names.

    Raises:
        UserError: it is missing, unreadable, of an unknown kind, or cannot be streamed.
    """
    place, is_folder = located(source, data_dir)
    if place is not None and not is_folder:
        return [_file(place)]
    from . import huggingface

    if place is None:
        commit, readers = huggingface.hub_shards(source)
        return [Shard([source.path, commit, i], partial(_counted, rows)) for i, rows in enumerate(readers)]
    files, saved = huggingface.folder_shards(place, source.split)
    if saved is not None:
        return [Shard([place.name, saved[1]], partial(_counted, saved[0]))]
    return [_file(file) for file in files]


def beginning(source: Source, data_dir: Path, count: int) -> Iterator[Record]:
    """Return the first rows of a source, in the order of its shards.

    Raises:
        UserError: as for `shards_of`.
    """
    rows = (row for shard in shards_of(source, data_dir) for row, _ in shard.rows(()))
    return islice(rows, min(count, source.limit or count))


def _file(place: DataPath) -> Shard:
    place.check()
    try:
        info = place.system.info(place.path) if place.system.exists(place.path) else {}
    except Exception as error:
        raise explained(place.name, error, place) from error
    about = [place.name, *(str(info[name]) for name in TOLD if name in info)]
    return Shard(about, partial(_behind, place))


def _behind(place: DataPath, mark: Mark) -> Iterator[tuple[Record, Mark]]:
    kind = kind_of(place.name) or ""
    if kind == "jsonl":
        return read_file(place, lambda place: marked_lines(place, *mark))

    def rows(first: int) -> Iterator[Record]:
        if kind in ("json", "csv"):
            return islice(read_file(place), first, None)
        from .column_files import READERS

        return read_file(place, lambda place: READERS[kind](place, first))

    return _counted(rows, mark)


def _counted(rows: Callable[[int], Iterator[Record]], mark: Mark) -> Iterator[tuple[Record, Mark]]:
    first = mark[0] if mark else 0
    return ((row, [number]) for number, row in enumerate(rows(first), first + 1))


class Cursor:
    """Read the rows of a source, pass after pass over its shards.

    Args:
        number: the source's number in data.train.
        seed: sets, with the pass, the shards' order; None keeps it. A source with a limit keeps it as well:
            the limit selects its first rows.
        after: the position of an earlier cursor, as JSON values; empty at the beginning.
    """

    def __init__(
        self, source: Source, shards: Sequence[Shard], number: int, seed: int | None, after: Mapping[str, Any]
    ) -> None:
        self._source, self._shards, self._number = source, shards, number
        self._seed = seed if source.limit is None else None
        self._pass, self._shard = int(after.get("pass", 0)), int(after.get("shard", 0))
        self._taken = int(after.get("rows", 0))
        self._mark: Mark = after.get("mark", ())
        self._rows: Iterator[tuple[Record, Mark]] | None = None

    @property
    def position(self) -> dict[str, Any]:
        """Return the position after the last taken row: the pass, the shard in its order, the mark in the
        shard, and the number of rows of the pass so far."""
        return {"pass": self._pass, "shard": self._shard, "mark": list(self._mark), "rows": self._taken}

    def take(self, count: int) -> Iterator[Record]:
        """Take this many rows.

        Raises:
            UserError: the source cannot be read, or has no rows.
        """
        return (self._next() for _ in range(count))

    def _next(self) -> Record:
        while True:
            if self._taken != self._source.limit and self._shard < len(self._shards):
                if self._rows is None:
                    self._rows = self._shards[self._order[self._shard]].rows(self._mark)
                found = next(self._rows, None)
                if found is not None:
                    row, self._mark = found
                    self._taken += 1
                    return row
                self._shard += 1
            else:
                self._begin_again()
            self._rows, self._mark = None, ()

    @property
    def _order(self) -> Sequence[int]:
        if self._seed is None:
            return range(len(self._shards))
        random = np.random.default_rng([self._seed, self._number, self._pass])
        order: list[int] = random.permutation(len(self._shards)).tolist()
        return order

    def _begin_again(self) -> None:
        path = self._source.path
        if not self._taken:
            raise UserError(f"{path} is empty", "a stream reads rows from it")
        self._pass += 1
        say(f"all {self._taken:,} rows of {path} are read; pass {self._pass + 1} over them begins")
        self._shard = self._taken = 0
