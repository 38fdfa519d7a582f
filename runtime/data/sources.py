"""Stream the rows of every source of a recipe, for training and for evaluation.

Training and evaluation have separate sources, or two parts of the same rows. A function of the user's
file may change each row before its format is read.
"""

from __future__ import annotations

import hashlib
import math
import os
import posixpath
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property, partial
from importlib.machinery import SourceFileLoader
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from ..errors import UserError, first_line
from ..settings import DataSettings, Source
from .advice import SHAPES, advice
from .file_rows import ENDINGS, HUB, DataFile, Record, explained, kind_of, place_of
from .formats import PARSERS, AnySample, ParsedSample
from .huggingface import DataFolder, HubDataset
from .picture_rows import MARK, refuse_pictures, taken
from .pictures import picture_of
from .row_counts import Problems, SplitReport
from .row_values import ColumnRow, Malformed, kind, without_fillers


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
    division = Division(data.train, data.eval_fraction, data.eval_seed, data_dir)
    return (
        Split("data.train", data.train, division),
        Split("data.eval_fraction", data.train, division, held_out=True),
    )


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


def count(source: Source, data_dir: Path) -> int:
    """Count the rows that `records` gives. Data sets of the hub, saved ones and Parquet files state their
    count; other sources are read.

    Raises:
        UserError: as for `records`.
    """
    rows = dataset_of(source, data_dir).count(source.limit)
    return rows if source.limit is None else min(rows, source.limit)


def _is_metadata(origin: str) -> bool:
    """Return whether a row is of the metadata file of a folder of pictures."""
    return posixpath.basename(origin).startswith("metadata.")


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
    for number, source in enumerate(sources):
        settings = data.of(source)
        name, transform = settings.transform, None
        if name is not None:
            transform = transforms[name] = transforms.get(name) or Transform.load(name, data_dir)
        source = Source(source) if isinstance(source, str) else source
        part = None if chosen is None else chosen[number]
        readers.append(Reader(source, settings, data_dir, transform, part))
    return readers


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
        self._data_dir = data_dir
        self._parse = PARSERS[data.format]
        self._transform = transform
        self._chosen = chosen

    def __iter__(self) -> Iterator[AnySample]:
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
                pictures: list[tuple[str, Any]] = []
                if self._data.images is not None:
                    row, pictures = taken(row, self._data.fields, _is_metadata(origin))
                else:
                    refuse_pictures(row, self._data.fields)
                parsed = self._parse(origin, row, self._data.fields)
                if pictures:
                    parsed = self._with_pictures(parsed, pictures, origin)
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

    def _with_pictures(
        self, sample: AnySample, pictures: Sequence[tuple[str, Any]], origin: str
    ) -> ParsedSample:
        """Return a sample with its pictures, whose paths start from the folder of the row's file."""
        if not isinstance(sample, ParsedSample) or sample.messages is None:
            raise Malformed(f"a sample of the format {self._data.format} has no place for a picture")
        marks = sum(message["content"].count(MARK) for message in sample.messages)
        if marks != len(pictures):
            raise Malformed(f"{marks} places of pictures are read, of {len(pictures)} in the row")
        folder = self._folder(origin)
        return replace(
            sample, images=tuple((what, picture_of(value, what, folder)) for what, value in pictures)
        )

    def _folder(self, origin: str) -> str:
        """Return the folder, or the bucket's address, that relative paths of pictures start from; "" for a
        data set of the hub, which has none."""
        assert self._data.images is not None
        folder = self._data.images.folder
        if folder is None:
            name = re.sub(r"[:#]\d+$", "", origin)
            if kind_of(name) is not None:
                folder = posixpath.dirname(name)
            elif self.source.path.startswith(HUB):
                return ""
            else:
                folder = self.source.path
        return folder if "://" in folder else os.path.abspath(self._data_dir / Path(folder).expanduser())

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


def records(source: Source, data_dir: Path) -> Iterator[Record]:
    """Return the unparsed rows of a source with their places, at most `source.limit`.

    Raises:
        UserError: it is missing, unreadable, or not of a kind that is known.
    """
    return islice(dataset_of(source, data_dir).rows(), source.limit)


def dataset_of(source: Source, data_dir: Path) -> DataFile | DataFolder | HubDataset:
    """Return the file, folder or data set of the hub that a source names. Its rows are not read yet.

    Raises:
        UserError: it is missing, or of an unknown kind.
    """
    path = source.path
    if path.startswith(HUB) and kind_of(path) is None:
        return HubDataset(source)
    place = place_of(path, data_dir)
    try:
        # Checking whether a web address is a folder would download it.
        is_folder = not path.startswith(("http://", "https://")) and place.system.isdir(place.path)
        missing = not is_folder and kind_of(path) is None and not place.system.exists(place.path)
    except Exception as error:
        raise explained(path, error, place) from error
    if missing:
        raise explained(path, FileNotFoundError(), place)
    for key, value in (("config", source.config), ("split", None if is_folder else source.split)):
        if value is not None:
            raise UserError(
                f"{path} is not a data set of the Hugging Face hub, and has no {key} {value!r}",
                f"remove data's {key}, or name the data set as {HUB}OWNER/NAME",
            )
    if is_folder:
        return DataFolder(place, source.split)
    if kind_of(path) is None:
        raise UserError(f"the ending of {path} does not show its format", f"known ones are {ENDINGS}")
    return DataFile(place)


class Transform:
    """A function row -> row or None.

    It is called once for each row and reading, in the source's order. It gets the row as in the source (a
    dict of columns by the source's names; data.fields is applied afterwards) and may change it. It should
    depend on the row alone: every host calls it, and tokenized data is cached by content.

    Attributes:
        name: FILE.py:FUNCTION, for messages.
    """

    def __init__(self, name: str, path: Path, function: Callable[..., Any]) -> None:
        self.name = name
        self._path = path
        self._function = function

    @classmethod
    def load(cls, transform: str, folder: Path) -> Transform:
        """Load the function of "FILE.py:FUNCTION".

        Args:
            folder: the base of a relative FILE.

        Raises:
            UserError: there is no such file or function, or importing the file fails.
        """
        file, _, function = transform.rpartition(":")
        path = (folder / Path(file).expanduser()).absolute()
        name = f"{path.name}:{function}"
        if not file or not path.is_file():
            raise UserError(
                f"data.transform names {transform!r}, but there is no file {path}",
                "write FILE.py:FUNCTION, and put the file next to train.py",
            )
        module = _imported(path)
        callable_ = getattr(module, function, None)
        if not callable(callable_):
            raise _no_function(module, path.name, function)
        return cls(name, path, callable_)

    def __call__(self, row: dict[str, Any], origin: str) -> dict[str, Any] | None:
        """Return a row's replacement; None to leave the row out.

        Raises:
            UserError: the function raises, or returns neither a row nor None.
        """
        try:
            changed = self._function(row)
        except (Exception, SystemExit) as error:
            line = _line(error, self._path)
            raise UserError(
                f"{self._path.name}{f':{line}' if line else ''}: data.transform fails on {origin}: "
                f"{type(error).__name__}: {first_line(error)}",
                f"correct {self.name}; None leaves a row out",
            ) from error
        if changed is None or isinstance(changed, dict):
            return changed
        raise UserError(
            f"{self.name} returns {kind(changed)} for {origin}",
            "data.transform returns a row (a dict) or None",
        )


def _imported(path: Path) -> ModuleType:
    """Import the file as a module with a private name. No bytecode is written or read."""
    name = f"_recipe_transform_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    loader = SourceFileLoader(name, str(path))
    module = ModuleType(name)
    module.__file__ = str(path)
    sys.modules[name] = module  # dataclasses look up their module there
    try:
        exec(loader.source_to_code(loader.get_data(str(path)), str(path)), module.__dict__)
    except SyntaxError as error:
        raise UserError(
            f"{path.name}:{error.lineno or 1} is not Python: {error.msg}", f"correct {path}"
        ) from error
    except (Exception, SystemExit) as error:
        line = _line(error, path)
        missing = isinstance(error, ImportError)
        raise UserError(
            f"{path.name}{f':{line}' if line else ''}: the file of data.transform cannot be imported: "
            f"{type(error).__name__}: {first_line(error)}",
            "the file must not need other files: install the packages that it imports, and move the code of "
            "other modules into it"
            if missing
            else f"correct {path}",
        ) from error
    return module


def _no_function(module: ModuleType, file: str, function: str) -> UserError:
    here = [
        name
        for name, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    close = get_close_matches(function, here, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]}? " if close else ""
    return UserError(
        f"{file} has no function {function!r}", f"{hint}it has {', '.join(here) or 'no functions'}"
    )


def _line(error: BaseException, path: Path) -> int | None:
    """Return the last line of the user's file that an exception passed through."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
