"""Stream the rows of every source of a recipe, for training and for evaluation.

Training and evaluation have separate sources, or two parts of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..errors import UserError
from ..settings import DataSettings, Source
from .advice import SHAPES, advice
from .files import located, read_file
from .parsers import parser_of
from .report import Problems, SplitReport
from .text_files import Record
from .values import ColumnRow, Malformed, without_fillers

if TYPE_CHECKING:
    from .division import Division
    from .formats import AnyRow
    from .transform import Transform


@dataclass(frozen=True)
class Split:
    """The rows for training, or the rows for evaluation.

    Attributes:
        name: its key in the recipe.
        sources: the sources of its rows.
        division: the division of the sources' rows in two; None if the split has all rows.
        held_out: which part of the division it has.
    """

    name: str
    sources: Sequence[str | Source]
    division: Division | None = None
    held_out: bool = False

    @property
    def part(self) -> list[float] | None:
        """Return a description of the choice of its rows, None for all rows."""
        if self.division is None:
            return None
        return [self.division.fraction, self.division.seed, self.held_out]

    def chosen(self) -> list[np.ndarray] | None:
        """Return bool[rows] of each source, True for the rows of this split; None for all."""
        if self.division is None:
            return None
        return [mask == self.held_out for mask in self.division.held_out]


def splits(data: DataSettings, data_dir: Path) -> tuple[Split, Split | None]:
    """Return the training split and, if any, the evaluation split. No source is read yet."""
    if data.eval_fraction is None:
        return Split("data.train", data.train), Split("data.eval", data.eval) if data.eval else None
    from .division import Division

    division = Division(data.train, data.eval_fraction, data.eval_seed, data_dir)
    return (
        Split("data.train", data.train, division),
        Split("data.eval_fraction", data.train, division, held_out=True),
    )


class Reader:
    """Stream the rows of one source. Each iteration reads the source and counts from zero.

    Attributes:
        source: the source, with its path and weight.
        read: (chosen) rows of the source that were read so far; complete when the iteration
            has ended.
        malformed: rows that were left out because they do not match the format.
        removed: rows for which the transform returned None.
        records: yields the source's unparsed rows.
        whole: whether these rows represent the source: all of a few rows may be unusable by chance.
    """

    def __init__(
        self,
        source: Source,
        data: DataSettings,
        data_dir: Path,
        transform: Transform | None,
        chosen: np.ndarray | None = None,
    ) -> None:
        self.source = source
        self.read = 0
        self.malformed = Problems()
        self.removed = 0
        self.records: Callable[[], Iterable[Record]] = partial(records, source, data_dir)
        self.whole = True
        self._data = data
        self._parse = parser_of(data.format)
        self._transform = transform
        self._chosen = chosen

    def __iter__(self) -> Iterator[AnyRow]:
        """Yield the well-formed rows, in order.

        Raises:
            UserError: the source is missing, unreadable or empty, none of its rows can be used, or the
                transform fails on one.
        """
        self.read = self.removed = 0
        self.malformed = Problems()
        columns: list[str] | None = None
        kept = False
        for number, (origin, row) in enumerate(self.records()):
            if not self._takes(number):
                continue
            self.read += 1
            try:
                if isinstance(row, Malformed):
                    raise row
                columnar = isinstance(row, ColumnRow)
                if self._transform is not None:
                    transformed = self._transform(row, origin)
                    if transformed is None:
                        self.removed += 1
                        continue
                    row = transformed
                row = without_fillers(row) if columnar else row
                parsed = self._parse(origin, row, self._data.fields)
            except Malformed as error:
                if columns is None and isinstance(row, dict):
                    columns = [str(name) for name in row]
                self.malformed.add(origin, str(error))
                continue
            kept = True
            yield parsed
        if not kept and self.whole and self._is_most_of_it():
            raise self._nothing(columns or [])

    def count(self, report: SplitReport) -> None:
        """Add the counts of the rows that were read."""
        report.read += self.read
        report.removed += self.removed
        report.malformed.merge(self.malformed)

    def _takes(self, number: int) -> bool:
        if self._chosen is None:
            return True
        if number >= len(self._chosen):
            raise UserError(
                f"{self.source.path} has more rows than the {len(self._chosen)} that were counted before",
                "start again when no program writes to it",
            )
        return bool(self._chosen[number])

    def _is_most_of_it(self) -> bool:
        return self._chosen is None or not len(self._chosen) or 2 * self.read > len(self._chosen)

    def _nothing(self, columns: list[str]) -> UserError:
        path, format = self.source.path, self._data.format
        if not self.read:
            part = f", split {self.source.split}," if self.source.split else ""
            return UserError(f"{path}{part} is empty", f"a row is {SHAPES[format]}")
        if self._transform is not None and not self.malformed.count:
            return UserError(
                f"{self._transform.name} returns None for each of the {self.read} rows of {path}",
                "data.transform returns the rows that are to be kept",
            )
        first = self.malformed.first[0]
        of_which = f" ({self.removed} removed by data.transform)" if self.removed else ""
        return UserError(
            f"none of the {self.read} rows of {path}{of_which} is of the format {format}: the first, "
            f"{first.origin}: {first.reason}",
            advice(format, self._data.fields, columns),
        )


Chosen = Sequence[np.ndarray] | None
"""bool[rows] of each source, True where a row is taken; None takes all."""


def open_rows(
    sources: Sequence[str | Source], data: DataSettings, data_dir: Path, chosen: Chosen = None
) -> list[Reader]:
    """Return a reader for each source, in order. No source is read yet.

    Args:
        data_dir: the base of sources' relative paths (and of data.transform's, unless the script states an
            absolute path).

    Raises:
        UserError: the transform cannot be loaded.
    """
    transforms: dict[str, Transform] = {}
    readers = []
    for number, given in enumerate(sources):
        source, own = Source(given) if isinstance(given, str) else given, data.of(given)
        if own.transform is not None and own.transform not in transforms:
            from .transform import Transform

            transforms[own.transform] = Transform.load(own.transform, data_dir)
        transform = transforms[own.transform] if own.transform is not None else None
        part = None if chosen is None else chosen[number]
        readers.append(Reader(source, own, data_dir, transform, part))
    return readers


def records(source: Source, data_dir: Path) -> Iterator[Record]:
    """Yield the unparsed rows of a source with their places, at most `source.limit`.

    Raises:
        UserError: it is missing, unreadable, or not of a kind that is known.
    """
    place, is_folder = located(source, data_dir)
    if place is not None and not is_folder:
        return islice(read_file(place), source.limit)
    from . import huggingface

    rows = huggingface.read_hub(source) if place is None else huggingface.read_folder(place, source.split)
    return islice(rows, source.limit)
