"""Read the tensors of a folder from the headers of its safetensors: names, types and shapes, no values."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LARGEST = 100_000_000
"""The largest size in bytes of a header, and of the index; the safetensors library sets the same limit."""


@dataclass(frozen=True)
class Listed:
    """A tensor: its file, and its type as safetensors names it."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def tensors_in(folder: Path) -> dict[str, Listed] | None:
    """Return each tensor by its name; None for a folder without safetensors.

    Raises:
        FileNotFoundError: a file that the index names is missing.
        ValueError: a file is not a valid safetensors file.
    """
    if (folder / SINGLE).is_file():
        files = [SINGLE]
    elif (folder / INDEX).is_file():
        files = _files(folder / INDEX)
    else:
        return None
    out: dict[str, Listed] = {}
    for name in files:
        out |= _header(folder / name)
    return out


def _files(index: Path) -> list[str]:
    """Return the names of the files that an index lists; the files lie next to it."""
    if index.stat().st_size > LARGEST:
        raise ValueError(f"{INDEX} has more than {LARGEST:,} bytes")
    content = _json(index.read_bytes(), INDEX)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, Mapping) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ValueError(f"{INDEX} has no weight_map")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise ValueError(f"{INDEX} names files of other folders")
    return names


def _header(path: Path) -> dict[str, Listed]:
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, f"{path.name} is missing")
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(LARGEST, path.stat().st_size):
            raise ValueError(f"{path.name} is not a safetensors file")
        entries = _json(file.read(length), path.name)
    return {name: _tensor(entry, path.name) for name, entry in entries.items() if name != "__metadata__"}


def _tensor(entry: Any, file: str) -> Listed:
    fields = entry if isinstance(entry, Mapping) else {}
    shape, dtype = fields.get("shape"), fields.get("dtype")
    if not isinstance(shape, list) or not isinstance(dtype, str):
        raise ValueError(f"the header of {file} is not that of a safetensors file")
    if not all(type(n) is int and 0 <= n < 2**31 for n in shape):
        raise ValueError(f"the header of {file} is not that of a safetensors file")
    return Listed(file, dtype, tuple(shape))


def _json(content: bytes, file: str) -> Mapping[str, Any]:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, Mapping):
        raise ValueError(
            f"{file} is not a safetensors file" if file != INDEX else f"{file} is not a JSON object"
        )
    return value
