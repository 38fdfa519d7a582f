"""How long a merge will take, estimated from its first seconds' worth of work, without writing anything."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from runtime.checkpoint import BaseCheckpoint
from runtime.export.plan import Piece, Plan, Shard
from runtime.export.quantized import Quantization
from runtime.export.writer import WORKERS, shard_chunks
from runtime.safetensors_writer import raw

SECONDS = 1.5
"""That each kind of work is measured for."""


def estimated_seconds(plan: Plan, base: BaseCheckpoint, quantization: Quantization | None) -> float:
    """Seconds of reading, arithmetic and hashing at this machine's pace; the output's disk is not counted.

    The largest tensor of each kind is worked on for up to `SECONDS`.
    """
    total = 0.0
    for kind in (True, False):
        pieces = [piece for piece in plan.pieces if piece.copied is kind and piece.size]
        if pieces:
            pace = _pace(max(pieces, key=lambda piece: piece.size), base, quantization)
            total += sum(piece.size for piece in pieces) / pace
    return total


def _pace(piece: Piece, base: BaseCheckpoint, quantization: Quantization | None) -> float:
    """Bytes of output a second."""
    with ThreadPoolExecutor(WORKERS) as pool:
        next(_hashed(piece, base, pool, quantization))  # compiles, and opens the file
        done, started = 0, time.perf_counter()
        for size in _hashed(piece, base, pool, quantization):
            done += size
            if time.perf_counter() - started > SECONDS:
                break
        return done / max(time.perf_counter() - started, 1e-6)


def _hashed(
    piece: Piece, base: BaseCheckpoint, pool: ThreadPoolExecutor, quantization: Quantization | None
) -> Iterator[int]:
    digest = hashlib.sha256()
    for chunk in shard_chunks(Shard("", b"", (piece,)), base, pool, quantization):
        digest.update(chunk if isinstance(chunk, memoryview) else raw(chunk))
        yield chunk.nbytes
