"""Check a merged folder against its record and its base: the files' hashes and their tensors."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UNREADABLE, UserError
from ..progress import Progress
from ..thread_pool import in_order
from ..weights.checkpoint import DTYPES, INDEX, HFCheckpoint
from ..weights.files import Files, json_object
from ..weights.headers import Tensor, View, read_header

HASHERS = 4
"""Number of files that are hashed at a time."""
QUANTIZED = ("F8_E4M3", "I8")
SCALE = "_scale"
"""The suffix of a quantized weight's name for its scale."""
AGAIN = "remove the folder and merge again"
UNUSABLE = f"{AGAIN}; if the error remains, do not use the merged checkpoint"

Rows = np.ndarray
"""Indices along a tensor's first axis, ascending: int64[rows]."""


def check_files(folder: Path, record: Mapping[str, Any]) -> int:
    """Hash every file that merge.json lists, and return the bytes of all.

    Args:
        record: the content of merge.json.

    Raises:
        UserError: naming the first file that is missing or differs from what was written.
    """
    files: Mapping[str, Mapping[str, Any]] = record.get("files") or {}
    if not files:
        raise UserError(f"{folder}: merge.json lists no files", AGAIN)
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: is missing; merge.json lists it", AGAIN)
        if path.stat().st_size != entry["size"]:
            raise UserError(
                f"{path}: has {path.stat().st_size:,} bytes, merge.json says {entry['size']:,}", AGAIN
            )
    size = sum(entry["size"] for entry in files.values())
    jobs = ((name, partial(_sha256, folder / name)) for name in files)
    with Progress("hashing", size, unit="B") as progress, ThreadPoolExecutor(HASHERS) as pool:
        for name, digest in in_order(pool, jobs, len(files)):
            expected = files[name]["sha256"]
            if digest != expected:
                raise UserError(
                    f"{folder / name}: is not what was written: its SHA-256 is {digest[:12]}..., "
                    f"merge.json says {expected[:12]}...",
                    AGAIN,
                )
            progress.advance(files[name]["size"])
    return size


def _sha256(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}", UNREADABLE) from error


class MergedFiles:
    """The tensors of all safetensors files of a local folder.

    Args:
        folder: the merged checkpoint's folder.

    Raises:
        UserError: when a file cannot be read, or a name is in two of them.
    """

    def __init__(self, folder: Path) -> None:
        self.files = Files(folder)
        self.tensors: dict[str, Tensor] = {}
        for file in sorted(name for name in self.files.sizes if name.endswith(".safetensors")):
            for name, tensor in read_header(self.files, file).tensors.items():
                if name in self.tensors:
                    raise UserError(
                        f"{folder}: {name} is in both {self.tensors[name].file} and {file}", AGAIN
                    )
                self.tensors[name] = tensor

    def path(self, name: str) -> str:
        """Return the path of a tensor's file."""
        return self.files.path(self.tensors[name].file)

    def quantized(self, name: str) -> bool:
        """Return whether a tensor is stored with a scale."""
        return self.tensors[name].dtype in QUANTIZED and name + SCALE in self.tensors

    def rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return rows of a tensor in its own type: [rows, elements of a row]."""
        return rows_of(self.tensors[name], self.files.view, rows)


def rows_of(tensor: Tensor, view: View, rows: Rows) -> np.ndarray:
    """Return rows of a tensor in its own type: [rows, elements of a row]."""
    dtype, width = DTYPES[tensor.dtype], math.prod(tensor.shape[1:])
    size = width * dtype.itemsize
    parts = []
    for stretch in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        data = tensor.bytes_of(view, int(stretch[0]) * size, (int(stretch[-1]) + 1) * size)
        parts.append(np.frombuffer(data, dtype).reshape(-1, width))
    return np.concatenate(parts)


def check_names(base: HFCheckpoint, trained: set[str], merged: MergedFiles, dtype: str) -> None:
    """Check that the files hold each of the base's tensors once, and the scales of quantized tensors.

    Args:
        trained: names of the tensors that training changed.
        dtype: type of these tensors.

    Raises:
        UserError: naming the first tensor that is missing, is not in the base, or has another shape or type;
            or when the index does not match.
    """
    folder = merged.files.name
    for name, tensor in base.tensors.items():
        merged_tensor = merged.tensors.get(name)
        if merged_tensor is None:
            raise UserError(f"{folder}: holds no {name}, which the base has", AGAIN)
        if merged_tensor.shape != tensor.shape:
            raise UserError(
                f"{merged.path(name)}: {name} has shape {list(merged_tensor.shape)}, the base's has "
                f"{list(tensor.shape)}",
                AGAIN,
            )
        wanted = dtype if name in trained else DTYPES[tensor.dtype].name
        kind = DTYPES[merged_tensor.dtype].name
        if kind != wanted and not merged.quantized(name):
            raise UserError(f"{merged.path(name)}: {name} is of type {kind}, expected {wanted}", AGAIN)
    scales = {name + SCALE for name in base.tensors if merged.quantized(name)}
    for name in sorted(merged.tensors.keys() - base.tensors.keys() - scales):
        raise UserError(f"{merged.path(name)}: holds {name}, which the base does not have", AGAIN)
    files = {name: tensor.file for name, tensor in merged.tensors.items()}
    if INDEX in merged.files.sizes:
        index = json_object(merged.files.read(INDEX), merged.files.path(INDEX), AGAIN)
        if index.get("weight_map") != files:
            raise UserError(f"{merged.files.path(INDEX)}: does not name the file of each tensor", AGAIN)
    elif len(set(files.values())) > 1:
        raise UserError(f"{folder}: has several safetensors files and no {INDEX}", AGAIN)
