"""Read, tokenize and pack training data during the run, for data larger than the disk or the memory.

Each source is a list of shards, and a cursor reads their rows, pass after pass. The rows of all sources
are cut into windows of data.stream_window rows. A seed draws how many of a window's rows each source
gives, by the sources' weights, and orders the window's samples. Packing stays within a window. As without
a stream, the rows of an optimizer step depend only on the data, the settings and the seed: not on the
devices, nor on where a run was interrupted.

A checkpoint holds the place in each source at which the window of its last row begins. A resumed run
reads that window again, and compares its digest with the digest in the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UserError, say
from ..settings import DataSettings, Source
from .advice import check_split
from .batches import Batching, Row, Schedule, Step
from .encoding import Coding
from .epochs import PackedRows, measure_rows, pack
from .file_rows import Mark, Record, Shard
from .row_counts import SplitReport, evaluation_warning
from .samples import Samples, join
from .sources import dataset_of, open_rows
from .workers import Workers


def beginning(source: Source, data_dir: Path, count: int) -> Iterator[Record]:
    """Return the first rows of a source, in the order of its shards.

    Raises:
        UserError: as for `dataset_of`, or the source cannot be streamed.
    """
    shards = dataset_of(source, data_dir).shards()
    rows = (row for shard in shards for row, _ in shard.rows(()))
    return islice(rows, min(count, source.limit or count))


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
                marked_row = next(self._rows, None)
                if marked_row is not None:
                    row, self._mark = marked_row
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
        say(f"note: all {self._taken:,} rows of {path} are read; pass {self._pass + 1} over them begins")
        self._shard = self._taken = 0


HELD = 2
"""Windows that are in memory, in addition to the one that is being read."""

PATIENCE = 30.0
"""Seconds to wait for a reader that has to end."""

REMEMBERED = 1024
"""Number of windows whose beginnings are remembered, so that they can be read again."""


@dataclass(frozen=True)
class Begin:
    """The beginning of a window.

    Attributes:
        number: the window's number, from 0.
        first: the number of its first row in the run.
        at: the `Cursor.position` in each source; empty at the beginning of the run.
    """

    number: int
    first: int
    at: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Window:
    """A window that was read.

    Attributes:
        rows: rows of its samples' groups, in the order of training.
        report: counts of the rows that were read.
    """

    begin: Begin
    samples: Samples
    rows: PackedRows
    report: SplitReport

    @property
    def end(self) -> int:
        """Return the number of the run's row after its last row."""
        return self.begin.first + len(self.rows)


class Windows:
    """The windows of a recipe's training data, in order.

    Args:
        data: settings with a stream_window.
        workers: processes that tokenize, None for a suitable number.

    Attributes:
        made_of: digest of the files' names and sizes, not of their content.
        weights: the weight of each source.
        held_out: the evaluation samples, which later windows are compared with.

    Raises:
        UserError: a source cannot be read or streamed.
    """

    def __init__(self, data: DataSettings, how: Coding, data_dir: Path, workers: int | None) -> None:
        assert data.stream_window is not None
        self._data, self._size = data, data.stream_window
        sources = [Source(source) if isinstance(source, str) else source for source in data.train]
        self.weights = [source.weight for source in sources]
        shards = [dataset_of(source, data_dir).shards() for source in sources]
        about = [self._size, how.loss_on, how.tokenizer, how.templates]
        about += [[shard.about for shard in shards_of_source] for shards_of_source in shards]
        self.made_of = hashlib.sha256(json.dumps(about).encode()).hexdigest()
        self._readers = open_rows(data.train, data, data_dir)
        self._cursors = [
            partial(Cursor, source, shards_of_source, number, data.shuffle_seed)
            for number, (source, shards_of_source) in enumerate(zip(sources, shards, strict=True))
        ]
        self._live: tuple[Sequence[Mapping[str, Any]], list[Cursor]] = ([], [])
        self._workers = Workers(how, data, workers)
        self.held_out: Samples | None = None
        self._reading = threading.Lock()
        self._closed = False

    def read(self, begin: Begin, label: str | None = None) -> tuple[Window, Begin]:
        """Read a window; return it and the beginning of the next. Rows left out are reported as notes.

        Args:
            label: label of the progress line; None for no line.

        Raises:
            UserError: a source cannot be read, or more of the window's rows than data.max_invalid_ratio
                allows cannot be used.
        """
        with self._reading:
            at, cursors = self._live
            if not cursors or at != begin.at:
                after = begin.at or [{}] * len(self._cursors)
                cursors = [cursor(position) for cursor, position in zip(self._cursors, after, strict=True)]
            self._live = [], []
            counts = self._random(begin, 0).multinomial(self._size, self._shares)
            for reader, cursor, count in zip(self._readers, cursors, counts, strict=True):
                reader.records = partial(self._taken, cursor, int(count))
                reader.whole = bool(count) and not begin.number
            samples, report = self._workers.tokenize(self._readers, label)
            where = [cursor.position for cursor in cursors]
            self._live = where, cursors
        check_split(f"data.train, window {begin.number + 1} of the stream", report, self._data)
        if begin.number:
            for note in report.notes():
                say(f"note: {note}")
            if self.held_out is not None:
                self._compare(begin, samples, self.held_out)
        rows = self._rows(begin, samples)
        measure_rows(report, [rows], samples)
        return Window(begin, samples, rows, report), Begin(begin.number + 1, begin.first + len(rows), where)

    def _compare(self, begin: Begin, samples: Samples, held_out: Samples) -> None:
        count, window = held_out.shared_with(samples), f"window {begin.number + 1} of the stream"
        if warning := evaluation_warning(count, len(held_out.fingerprints), (), window):
            say(f"note: {warning}")

    def close(self) -> None:
        """End a read that is in progress."""
        self._closed = True
        self._workers.close()

    def _taken(self, cursor: Cursor, count: int) -> Iterator[Record]:
        for row in cursor.take(count):
            if self._closed:
                return  # nothing waits for the window
            yield row

    def _rows(self, begin: Begin, samples: Samples) -> PackedRows:
        """Return groups by row: packed as in an epoch, in the order of the seed, or in the sources' order,
        which then alternates between sources."""
        sources = samples.group_sources
        groups = len(sources)
        random = self._random(begin, 1) if self._data.shuffle_seed is not None else None
        if random is not None:
            order = random.permutation(groups)
        else:
            counts = np.bincount(sources)
            within = np.arange(groups) - np.searchsorted(sources, sources)
            order = np.argsort((within + 0.5) / counts[sources], kind="stable")
        if not self._data.packing:
            return PackedRows(order, np.arange(groups + 1))
        packed = pack(samples.lengths, self._data.max_length, order)
        if random is None:
            return packed
        rows = [packed[row] for row in random.permutation(len(packed)).tolist()]
        offsets = np.cumsum([0, *map(len, rows)])
        return PackedRows(np.concatenate([np.asarray(row, np.int64) for row in rows]), offsets)

    @property
    def _shares(self) -> np.ndarray:
        return np.asarray(self.weights) / sum(self.weights)

    def _random(self, begin: Begin, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self._data.shuffle_seed or 0, begin.number, purpose])


class StreamSchedule(Schedule):
    """The micro-batches of a stream; a thread reads the next window during training on the current one.

    Request them in order, or again: of up to a thousand windows, each of which is then read again.

    Args:
        after: the data's state at the step after which the run continues; None at its beginning.
        batching: how the rows become micro-batches.

    Attributes:
        window: the first window that was read.
    """

    def __init__(self, windows: Windows, after: Mapping[str, Any] | None, batching: Batching) -> None:
        self._windows = windows
        begin = Begin(0, 0, [])
        if after is not None and after.get(WINDOW):
            begin = Begin(**after[WINDOW])
        self._lock = threading.RLock()
        self.window, following = windows.read(begin, "tokenizing the first window of data.train")
        self._begins = deque([begin, following], REMEMBERED)
        self._held = deque([self.window], HELD)
        self._ahead: Future[tuple[Window, Begin]] | None = None
        self._thread: threading.Thread | None = None
        super().__init__(batching, self.window.samples.group)

    def state(self, step: int) -> dict[str, Any]:
        """Return the beginning of the window of a step's last row, and its digest; None at step 0."""
        if not step:
            return {WINDOW: None, DIGEST: None}
        window = self._of(step * self.rows_per_step - 1)
        begin = {**vars(window.begin), "at": [dict(position) for position in window.begin.at]}
        return {WINDOW: begin, DIGEST: window.samples.digest}

    def hold_out(self, samples: Samples) -> None:
        """Report samples of later windows that are also among these, on which the run evaluates."""
        self._windows.held_out = samples

    def close(self) -> None:
        """End reading ahead, and wait for the thread: if it were in the tokenizer's code when the process
        ends, it would abort the process. A thread that waits for a bucket is left alone."""
        self._windows.close()
        if self._thread is not None:
            self._thread.join(PATIENCE)

    def _step_of(self, step: int) -> Step:
        row, end = step * self.rows_per_step, (step + 1) * self.rows_per_step
        parts: list[Samples] = []
        rows: list[Row] = []
        groups = 0
        while row < end:
            window = self._of(row)
            until = min(end, window.end)
            chosen = [window.rows[i - window.begin.first] for i in range(row, until)]
            parts.append(_only(window.samples, [group for packed in chosen for group in packed]))
            for packed in chosen:
                rows.append(tuple(range(groups, groups + len(packed))))
                groups += len(packed)
            row = until
        return Step(replace(join(parts), group=self._group), rows)

    def _of(self, row: int) -> Window:
        """Return the window that holds a row of the run."""
        with self._lock:
            while True:
                for window in self._held:
                    if window.begin.first <= row < window.end:
                        return window
                place = bisect_right(self._begins, row, key=lambda begin: begin.first) - 1
                if place < 0:
                    raise LookupError(f"row {row} of the stream is not known any more")
                begin = self._begins[place]
                if begin is self._begins[-1]:
                    ahead = self._ahead or self._start(begin)
                    window, following = ahead.result()
                    self._begins.append(following)
                    self._ahead = self._start(following)
                else:
                    window, _ = self._windows.read(begin)
                self._held.append(window)

    def _start(self, begin: Begin) -> Future[tuple[Window, Begin]]:
        """Read a window in a daemon thread, for which the end of the process does not wait."""
        future: Future[tuple[Window, Begin]] = Future()

        def read() -> None:
            try:
                future.set_result(self._windows.read(begin))
            except BaseException as error:
                future.set_exception(error)

        self._thread = threading.Thread(target=read, name="stream", daemon=True)
        self._thread.start()
        return future


WINDOW, DIGEST = "window", "window_sha256"
"""Keys in a checkpoint's data state: `Begin` of a window, and the digest of its samples."""


def _only(samples: Samples, groups: Sequence[int]) -> Samples:
    members = [member for group in groups for member in samples.members(group)]
    chosen = [samples[member] for member in members]
    return Samples(
        np.concatenate([sample.tokens for sample in chosen]),
        np.concatenate([sample.targets for sample in chosen]),
        np.concatenate([[0], np.cumsum([len(sample.tokens) for sample in chosen], dtype=np.int64)]),
        samples.sources[members],
        samples.origins[members],
        samples.liked[members] if len(samples.liked) else samples.liked,
    )
