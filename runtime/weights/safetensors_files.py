"""Read headers of safetensors files, and write the files tensor by tensor.

A header lists the tensors and the places of their bytes. No file has to fit in memory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import ml_dtypes
import numpy as np

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype("float64"),
    "F32": np.dtype("float32"),
    "F16": np.dtype("float16"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "I64": np.dtype("int64"),
    "I32": np.dtype("int32"),
    "I16": np.dtype("int16"),
    "I8": np.dtype("int8"),
    "U64": np.dtype("uint64"),
    "U32": np.dtype("uint32"),
    "U16": np.dtype("uint16"),
    "U8": np.dtype("uint8"),
    "BOOL": np.dtype("bool"),
}
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
