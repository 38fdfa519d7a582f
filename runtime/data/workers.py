"""Tokenize samples, in several processes if there are many.

The processes are spawned, because JAX's threads do not survive a fork. Each reads pickled chunks of
parsed samples from stdin, and writes tokenized ones to stdout. Chunks are cut by size alone, and results
are joined in order. So the result does not depend on the number of processes.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..progress import Progress
from ..settings import DataSettings
from ..thread_pool import in_order
from .encoding import Coding, Encoder
from .formats import AnySample, ParsedSample
from .row_counts import SplitReport
from .samples import Samples, join

if TYPE_CHECKING:
    from .sources import Reader

CHUNK = 2_500_000
"""Work of one request: some 600 samples of 4,000 characters."""

ALONE = 4 * CHUNK
"""Work that this process does by itself, in less time than other processes take to start."""

PER_SAMPLE = 500
"""Work of a sample in addition to its text, in characters."""

PER_PICTURE = 25_000
"""Work of a picture, which is decoded once, in characters."""

MOST_WORKERS = 32

Tokenized = tuple[Samples, SplitReport]


def tokenize(
    sources: Sequence[Reader], coding: Coding, data: DataSettings, workers: int | None, label: str
) -> Tokenized:
    """Tokenize the samples of some sources; return them in order, and counts of all rows of the sources.

    Args:
        sources: each is read once, when its samples are needed.
        workers: number of processes; None for one per core, or none for few samples.

    Raises:
        UserError: for the first refused sample (data.overlong: error), or for a fault of the
            template or the tokenizer.
    """
    with closing(Workers(coding, data, workers)) as processes:
        return processes.tokenize(sources, label)


class Workers:
    """Tokenize any number of times with the same processes."""

    def __init__(self, coding: Coding, data: DataSettings, workers: int | None) -> None:
        self._coding, self._workers = coding, workers
        self._group = 2 if data.format == "preference" else 1
        self._encoder: Encoder | None = None
        self._pool: _Pool | None = None
        self._threads: ThreadPoolExecutor | None = None

    def tokenize(self, sources: Sequence[Reader], label: str | None) -> Tokenized:
        """Return the samples and counts of some sources, with a progress line if there is a label for it."""
        chunks = _chunks(sources)
        first = list(islice(chunks, ALONE // CHUNK + 1))
        few = self._pool is None and len(first) <= ALONE // CHUNK
        count = self._workers if self._workers is not None else (0 if few else min(_cores(), MOST_WORKERS))
        left_out = SplitReport()
        parts: list[Samples] = []
        everything = _chain(first, chunks)
        encoded = self._in_processes(everything, count) if count > 1 else self._here(everything)
        with Progress(label or "", None if label else 0, unit="rows") as progress:
            for number, (samples, counts) in encoded:
                left_out.merge(counts)
                parts.append(samples)
                progress.advance(number)
        report = SplitReport(row_length=self._coding.max_length)
        for reader in sources:
            reader.count(report)
        report.merge(left_out)
        return replace(join(parts), group=self._group), report

    def close(self) -> None:
        """End the processes, even if they are working."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._pool is not None:
            self._pool.close()

    def _here(self, chunks: Iterable[tuple[int, list[AnySample]]]) -> Iterator[tuple[int, Tokenized]]:
        for source, samples in chunks:
            if self._encoder is None:
                self._encoder = Encoder(self._coding)
            yield len(samples), self._encoder.encode(samples, source)

    def _in_processes(
        self, chunks: Iterable[tuple[int, list[AnySample]]], count: int
    ) -> Iterator[tuple[int, Tokenized]]:
        if self._threads is None:
            self._pool, self._threads = _Pool(self._coding), ThreadPoolExecutor(count, "tokenizing")
        assert self._pool is not None
        encode = self._pool.encode
        jobs = ((len(samples), partial(encode, samples, source)) for source, samples in chunks)
        yield from in_order(self._threads, jobs, 3 * count)


def _chunks(sources: Sequence[Iterable[AnySample]]) -> Iterator[tuple[int, list[AnySample]]]:
    """Yield samples with the number of their source, in chunks of enough work."""
    for number, source in enumerate(sources):
        chunk: list[AnySample] = []
        work = 0
        for sample in source:
            chunk.append(sample)
            work += PER_SAMPLE + sum(len(text) for text in _texts(sample))
            work += PER_PICTURE * len(getattr(sample, "images", ()))
            if work >= CHUNK:
                yield number, chunk
                chunk, work = [], 0
        if chunk:
            yield number, chunk


def _texts(sample: AnySample) -> Iterable[str]:
    if not isinstance(sample, ParsedSample):
        return (text for answer in sample.answers() for text in _texts(answer))
    if sample.messages is None:
        return (sample.prompt or "", sample.completion or "")
    return (message["content"] for message in sample.messages)


def _chain(first: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    while first:
        yield first.pop(0)
    yield from rest


class _Pool:
    """One process for each thread that asks for one."""

    def __init__(self, coding: Coding) -> None:
        self._coding = pickle.dumps(coding, pickle.HIGHEST_PROTOCOL)
        self._local = threading.local()
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def encode(self, samples: list[AnySample], source: int) -> Tokenized:
        """Let the thread's own process encode some samples."""
        process = getattr(self._local, "process", None) or self._start()
        try:
            assert process.stdin is not None and process.stdout is not None
            pickle.dump((samples, source), process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            kind, value = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(
                f"a tokenizing process ended unexpectedly (exit status {process.wait()})",
                "most likely the machine ran out of memory; free some, or split the files",
            ) from error
        if kind == "user":
            raise UserError(*value)
        if kind == "fault":
            raise RuntimeError(f"in a tokenizing process:\n{value}")
        return value

    def close(self) -> None:
        """End the processes, even if they are working."""
        with self._lock:
            self._closed = True
            for process in self._processes:
                process.kill()
        for process in self._processes:
            process.wait()
            for stream in (process.stdin, process.stdout):
                try:
                    if stream is not None:
                        stream.close()
                except OSError:
                    pass

    def _start(self) -> subprocess.Popen[bytes]:
        root = Path(__file__).absolute().parents[__name__.count(".")]
        with self._lock:
            if self._closed:
                raise RuntimeError("tokenizing has been stopped")
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, str(root), __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
            self._processes.append(process)
        self._local.process = process
        assert process.stdin is not None
        try:
            process.stdin.write(self._coding)
            process.stdin.flush()
        except OSError:
            pass  # it has ended already; reading its answer reports that
        return process


_PROGRAM = (
    "import importlib, sys; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2]).main()"
)
"""Run with -P, so that a folder named runtime in the working directory is not used instead of this one."""


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def main() -> None:
    """Serve until stdin ends."""
    # Ctrl-C goes to the whole process group; this process ends when its parent closes the pipe.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests = sys.stdin.buffer
    # Output of libraries must not come between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    encoder = None
    try:
        while True:
            try:
                request = pickle.load(requests)
            except EOFError:
                return
            try:
                if encoder is None:
                    encoder = Encoder(request)
                    continue
                answer: tuple[str, Any] = ("samples", encoder.encode(*request))
            except UserError as error:
                answer = ("user", (error.message, error.help))
            except Exception:
                answer = ("fault", traceback.format_exc())
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
    except BrokenPipeError:
        os._exit(1)  # the parent has ended
