"""Write safetensors files tensor by tensor.

A header lists the tensors and the places of their bytes. No file has to fit in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from .headers import ELEMENTS, numpy_type

DTYPES = {code: numpy_type(code) for code in ELEMENTS}
"""Element types by their names in a safetensors header."""

CODES = {kind: code for code, kind in DTYPES.items()}
"""Names of element types in a safetensors header."""


class Writable(Protocol):
    """A target for bytes."""

    def write(self, data: Any, /) -> object: ...


def encode_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...], int]], metadata: Mapping[str, str]
) -> bytes:
    """Encode a header's JSON, padded to 8 bytes.

    Args:
        tensors: element type, shape and size in bytes of each tensor, in the order of their bytes.
        metadata: the file's metadata, {} for none.
    """
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    position = 0
    for name, (dtype, shape, size) in tensors.items():
        fields[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    return text + b" " * (-len(text) % 8)


def prefix(header: bytes) -> bytes:
    """Return the first bytes of a file: the header's length and the header."""
    return len(header).to_bytes(8, "little") + header


def raw(array: np.ndarray) -> memoryview:
    """Return an array's elements in C order, as bytes."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def write_arrays(
    file: Writable, arrays: Iterable[tuple[str, np.ndarray]], metadata: Mapping[str, str]
) -> None:
    """Write a small file of arrays, sorted by name."""
    ordered = sorted(arrays, key=lambda item: item[0])
    entries = {
        name: (CODES[array.dtype], array.shape, math.prod(array.shape) * array.dtype.itemsize)
        for name, array in ordered
    }
    file.write(prefix(encode_header(entries, metadata)))
    for _, array in ordered:
        file.write(raw(array))
