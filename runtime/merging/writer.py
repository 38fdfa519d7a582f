"""Write the planned shards; reading, adding, casting, hashing and writing run in parallel.

Workers compute blocks of rows, several at a time and across tensors. The blocks are written in order, and
hashed on a separate thread. Memory holds only a few blocks, for any size of checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from ..checkpoints.trained_weights import Delta
from ..errors import Spoiled
from ..interrupts import held
from ..progress import Progress
from ..thread_pool import in_order
from ..weights.checkpoint import HFCheckpoint
from ..weights.files import AGAIN
from ..weights.safetensors_files import DTYPES, prefix, raw
from .arithmetic import changer, is_finite, row_blocks
from .file_plan import MergePlan, Piece, Shard
from .journal import Journal

if TYPE_CHECKING:
    from .compressed_tensors import Quantization

COPY_BYTES = 1 << 23
"""Bytes of an unchanged tensor that are copied at a time."""
RELEASE_BYTES = 1 << 27
"""Written bytes of a tensor after which the system may reclaim the memory of what was read."""
FLUSH_BYTES = 1 << 28
"""Bytes of a file that are flushed to its disk together."""
WORKERS = min(8, os.cpu_count() or 1)
AHEAD = 2 * WORKERS + 2
"""Number of blocks that may be computed before they are written."""

Chunk = memoryview | np.ndarray


def write_shards(
    plan: MergePlan,
    base: HFCheckpoint,
    journal: Journal,
    quantization: Quantization | None = None,
) -> None:
    """Write the shards that the journal does not have yet, and record each.

    Args:
        quantization: the quantization of the plan.

    Raises:
        Spoiled: when a value is not finite.
        OSError: when a file cannot be written.
    """
    with (
        Progress("merging", plan.size, unit="B") as progress,
        ThreadPoolExecutor(WORKERS, thread_name_prefix="merge") as pool,
    ):
        for shard in plan.shards:
            if shard.file in journal.files:
                progress.skip(shard.size)
                continue
            with journal.folder.create(shard.file) as file, Sink(file) as sink:
                sink.write(prefix(shard.header))
                for chunk in _shard_chunks(shard, base, pool, quantization):
                    sink.write(chunk)
                    progress.advance(chunk.nbytes)
            if sink.size != shard.size:
                raise AssertionError(f"{shard.file}: {sink.size} bytes written, {shard.size} planned")
            journal.add(shard.file, sink.size, sink.sha256)


def _shard_chunks(
    shard: Shard, base: HFCheckpoint, pool: ThreadPoolExecutor, quantization: Quantization | None
) -> Iterator[Chunk]:
    """Yield the bytes of a shard's tensors, in order."""
    pieces = {piece.name: piece for piece in shard.pieces}
    jobs = ((name, job) for name, piece in pieces.items() for job in _jobs(piece, base))
    chunks = in_order(pool, jobs, AHEAD)
    for name, blocks in itertools.groupby(chunks, key=lambda item: item[0]):
        piece = pieces[name]
        values: Iterator[Any] = (block for _, block in blocks)
        written = held = 0
        for chunk in quantization.encode(values) if piece.quantized and quantization else values:
            yield chunk
            written += chunk.nbytes
            held += chunk.nbytes
            if held >= RELEASE_BYTES:
                base.release(name, forget=True)
                held = 0
        if written != piece.size:
            raise AssertionError(f"{piece.name}: {written} bytes made, {piece.size} planned")
        base.release(name, forget=True)


def _jobs(piece: Piece, base: HFCheckpoint) -> Iterator[Callable[[], Chunk]]:
    """Return jobs that compute each block of a piece: the base's bytes, or rows of a changed tensor."""
    tensor = base.tensors[piece.name]
    if piece.copied:
        step = tensor.block or COPY_BYTES
        for start in range(0, tensor.size, step):
            yield partial(_copied, piece.name, base, start, min(start + step, tensor.size))
        return
    kind = DTYPES[tensor.dtype]
    target = np.dtype("float32") if piece.quantized else DTYPES[piece.outputs[0].dtype]
    row_bytes = kind.itemsize * math.prod(tensor.shape[1:])

    def base_rows(rows: slice) -> np.ndarray:
        data = base.bytes_of(piece.name, rows.start * row_bytes, rows.stop * row_bytes)
        return np.frombuffer(data, kind).reshape(-1, *tensor.shape[1:])

    make = _kept(target) if piece.change is None else changer(piece.change, target)

    def rows_written(rows: slice) -> np.ndarray:
        block = make(base_rows, rows)
        if not is_finite(block):
            if isinstance(piece.change, Delta | None) and not is_finite(base_rows(rows)):
                raise _damaged(piece.name, base)
            raise Spoiled(
                f"{piece.name}: its merged values are not finite in {target.name}",
                "choose an earlier --step"
                if target == np.float32
                else "set merge.dtype to float32, or choose an earlier --step",
            )
        return block

    for rows in row_blocks(tensor.shape):
        yield partial(rows_written, rows)


def _kept(target: np.dtype) -> Callable[[Callable[[slice], np.ndarray], slice], np.ndarray]:
    return lambda base, rows: base(rows).astype(target)


def _copied(name: str, base: HFCheckpoint, start: int, end: int) -> memoryview:
    """Return bytes of an unchanged tensor; a scalar may be infinite, like a bound of Gemma 4's encoders."""
    data, tensor = base.bytes_of(name, start, end), base.tensors[name]
    if (kind := DTYPES.get(tensor.dtype)) is not None:
        values = np.frombuffer(data, kind)
        if not is_finite(values) and (tensor.shape or np.isnan(values.astype(np.float32)).any()):
            raise _damaged(name, base)
    return data


def _damaged(name: str, base: HFCheckpoint) -> Spoiled:
    return Spoiled(f"{base.name}/{base.tensors[name].file}: {name} holds values that are not finite", AGAIN)


class Behind:
    """Apply a function to each item of a queue, on a thread, at most `depth` items behind.

    The first item starts the thread. After an error the thread drops further items, so that no caller waits
    forever.
    """

    def __init__(self, work: Callable[[Any], object], depth: int) -> None:
        self._work = work
        self._items: queue.Queue[Any] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, item: Any) -> None:
        """Add an item; raise the error of the work on an earlier one."""
        with held():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._items.put(item)
        self.check()

    def check(self) -> None:
        """Raise the error of the work on an earlier item."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the last item."""
        with held():
            if self._thread is not None:
                self._items.put(None)
                self._thread.join()
                self._thread = None

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if self._error is None:
                try:
                    self._work(item)
                except BaseException as error:  # raised in the calling thread
                    self._error = error


class Sink:
    """A file that threads hash and flush to its disk while it is written.

    Attributes:
        size: number of bytes written.
        sha256: their hash, once the block has ended.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.size = 0
        self.sha256 = ""
        self._file = file
        self._digest = hashlib.sha256()
        self._hashed = Behind(self._digest.update, depth=2)
        self._flushed = Behind(_flusher(file), depth=1)
        self._begun = 0

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        with held():
            for behind in (self._flushed, self._hashed):
                behind.close()
        if kind is None:
            # A disk reports a failed write once: the following fsync would not report it again.
            for behind in (self._flushed, self._hashed):
                behind.check()
        self.sha256 = self._digest.hexdigest()

    def write(self, chunk: Chunk | bytes) -> None:
        """Append bytes, or an array's elements in C order."""
        data = raw(chunk) if isinstance(chunk, np.ndarray) else chunk
        self._hashed.put(data)
        self._file.write(data)
        self.size += len(data)
        if self.size - self._begun >= FLUSH_BYTES:
            self._flushed.put((self._begun, self.size))
            self._begun = self.size


def _flusher(file: IO[bytes]) -> Callable[[tuple[int, int]], None]:
    """Return a function that writes a part of a local file to its disk, and releases its memory.

    Otherwise the system would hold gigabytes of unwritten pages, and the end of each file would wait for
    them. Fresh pages also take more system time than released ones.
    """
    try:
        descriptor = file.fileno()
    except (AttributeError, OSError):  # an upload
        return lambda part: None

    def flush(part: tuple[int, int]) -> None:
        if hasattr(os, "posix_fadvise"):  # not on macOS
            os.fdatasync(descriptor)
            os.posix_fadvise(descriptor, part[0], part[1] - part[0], os.POSIX_FADV_DONTNEED)

    return flush
