"""Writes safetensors files tensor by tensor, so that no file has to fit in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import numpy as np

from runtime.checkpoint import DTYPES

CODES = {kind: code for code, kind in DTYPES.items()}
"""Names of element types in a safetensors header."""


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """The JSON of a header, padded to 8 bytes.

    Args:
        tensors: element type, shape and size in bytes of each tensor, in the order of their bytes.
        metadata: of the file, {} for none.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape, size) in tensors.items():
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


class TensorFile:
    """A safetensors file being written: the header first, then the bytes in its order."""

    def __init__(self, path: Path, header: bytes) -> None:
        self.file = path.open("xb")
        self.file.write(len(header).to_bytes(8, "little"))
        self.file.write(header)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.file.close()

    def write(self, chunk: memoryview | np.ndarray) -> None:
        """Appends bytes, or an array's elements in C order."""
        if isinstance(chunk, np.ndarray):
            chunk = np.ascontiguousarray(chunk).reshape(-1).view(np.uint8).data
        self.file.write(chunk)


def write_arrays(path: Path, arrays: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]) -> int:
    """Writes a small file of arrays, sorted by name; returns its size in bytes."""
    ordered = sorted(arrays, key=lambda item: item[0])
    entries = {
        name: (CODES[array.dtype], array.shape, math.prod(array.shape) * array.dtype.itemsize)
        for name, array in ordered
    }
    with TensorFile(path, encode_header(entries, metadata)) as file:
        for _, array in ordered:
            file.write(array)
    return path.stat().st_size
