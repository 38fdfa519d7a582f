"""Open a checkpoint's folder, and parse its safetensors headers: the tensors, and the places of their bytes.

The compiler also reads headers, so this does not import numpy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ..addresses import open_address
from ..errors import UserError
from .files import AGAIN, Files, RemoteFiles

if TYPE_CHECKING:
    import numpy as np

ELEMENTS: dict[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""NumPy's name of an element type and its bytes, by its name in a header."""
ITEM_BYTES = {code: size for code, (_, size) in ELEMENTS.items()}
FLOATING = ("F64", "F32", "F16", "BF16")

MOST_AXES = 32
"""The most axes of an array, NumPy's limit."""


View = Callable[[str, int, int], memoryview]
"""The bytes [start:end) of a file."""


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor: its file, its element type by safetensors' name, its bytes in the file.

    `form` is the name of the format in which it is stored quantized, None if it is not.
    """

    form: ClassVar[str | None] = None
    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def size(self) -> int:
        """Return the number of bytes of its values."""
        return self.end - self.start

    @property
    def block(self) -> int | None:
        """Return the number of bytes that are decoded at once; None if any range can be read alone."""
        return None

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """Return the tensors that it is made of, as stored in the files."""
        return (self,)

    def bytes_of(self, view: View, start: int, end: int) -> memoryview:
        """Return the bytes [start:end) of its values."""
        return view(self.file, self.start + start, self.start + end)


def tensors_of(fields: Mapping[str, Any], file: str, start: int) -> dict[str, Tensor]:
    """Return a header's tensors, in the order of their bytes.

    Args:
        fields: the fields of its JSON, without the metadata.
        start: where the tensors' bytes begin in the file.

    Raises:
        ValueError, TypeError, KeyError, AttributeError: when an entry is not a valid tensor.
    """
    tensors = {name: _tensor(file, entry, start) for name, entry in fields.items()}
    return dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))


def _tensor(file: str, entry: Any, start: int) -> Tensor:
    shape, (first, last) = entry["shape"], entry["data_offsets"]
    numbers = (*shape, first, last)
    if any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
        raise ValueError("a size or an offset is not a whole number")
    if not isinstance(entry["dtype"], str) or len(shape) > MOST_AXES:
        raise ValueError("an entry does not describe a tensor")
    return Tensor(file, entry["dtype"], tuple(shape), start + first, start + last)


def misplaced(tensors: Mapping[str, Tensor], start: int, size: int) -> str | None:
    """Return why tensors do not fill their file from `start` to its end without gaps; None if they do.

    Args:
        tensors: in the order of their bytes.
        size: of the file, in bytes.
    """
    expected = start
    for name, tensor in tensors.items():
        item = ITEM_BYTES.get(tensor.dtype)
        wrong_size = item is not None and math.prod(tensor.shape) * item != tensor.end - tensor.start
        if wrong_size or tensor.start != expected or tensor.end < tensor.start:
            return f"its header gives {name} bytes that do not fit its shape or place"
        expected = tensor.end
    if expected > size:
        return f"truncated: {size} bytes, {expected} expected"
    if expected < size:
        return f"{size - expected} bytes after the last tensor"
    return None


MAX_HEADER = 100_000_000
"""The most bytes of a header: the safetensors library's limit."""
HEAD = 1 << 20
"""Bytes that are read of a file at first: most headers are shorter, and need only one request."""
KIND = 512
"""Number of first bytes that show a file's kind."""


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        raw: its unchanged JSON from the file, padding included.
        tensors: in the order of their bytes.
        metadata: the file's own, {} for none.
        size: of the file, in bytes.
    """

    raw: bytes
    tensors: dict[str, Tensor]
    metadata: dict[str, str]
    size: int

    @property
    def data_start(self) -> int:
        return 8 + len(self.raw)


def numpy_type(code: str) -> np.dtype:
    """Return NumPy's type of an element type in a header."""
    import ml_dtypes  # noqa: F401 (with it, NumPy knows the names of its types)
    import numpy as np

    return np.dtype(ELEMENTS[code][0])


def files_of(directory: Path | str) -> Files:
    """Return the files of a folder on this machine, or at an address that fsspec knows.

    Raises:
        UserError: when no file system is known for the address, its package is missing, or the folder cannot
        be listed.
    """
    opened = open_address(directory)
    if isinstance(opened, Path):
        return Files(opened)
    return RemoteFiles(str(directory), *opened)


def read_header(files: Files, name: str) -> Header:
    """Read the header of a safetensors file, and check that every tensor is within the file.

    Raises:
        UserError: when the file is missing, truncated or not safetensors.
    """
    path, size = files.path(name), files.sizes[name]
    head = bytes(files.read(name, 0, min(size, HEAD)))
    length = int.from_bytes(head[:8], "little")
    check_kind(path, head)
    if size < 8 or length > MAX_HEADER:
        raise UserError(f"{path}: not a safetensors file", AGAIN)
    if 8 + length > size:
        raise UserError(f"{path}: truncated within its header ({size} of {8 + length} bytes)", AGAIN)
    raw = head[8 : 8 + length]
    if len(raw) < length:
        raw += bytes(files.read(name, len(head), 8 + length))
    try:
        fields = json.loads(raw)
        metadata = fields.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError("its metadata values are not text")
        tensors = tensors_of(fields, name, 8 + length)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise UserError(f"{path}: its header is not that of a safetensors file ({error})", AGAIN) from error
    wrong = misplaced(tensors, 8 + length, size)
    if wrong is not None:
        raise UserError(f"{path}: {wrong}", AGAIN)
    return Header(raw, tensors, metadata, size)


def check_kind(path: str, content: bytes) -> None:
    """Raise UserError if the first bytes of a file show that it is something else."""
    start = content[:KIND].lstrip().lower()
    if not content:
        raise UserError(f"{path}: is an empty file", AGAIN)
    if start.startswith(b"version https://git-lfs"):
        raise UserError(
            f"{path}: is a Git LFS pointer instead of the file", "run `git lfs pull` in that folder"
        )
    if start.startswith((b"<!doctype html", b"<html", b"<?xml")):
        raise UserError(
            f"{path}: is a web page or an error of the server that it came from",
            "download it again; a gated model needs HF_TOKEN",
        )
