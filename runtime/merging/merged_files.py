"""Check a merged folder against its record and its base: the files' hashes and their tensors.

The safetensors library reads the files, not the code that wrote them.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import UNREADABLE, UserError
from ..in_order import in_order
from ..progress import Progress
from ..weights.checkpoint import DTYPES, INDEX, HFCheckpoint

HASH_BYTES = 1 << 22
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
    lock = threading.Lock()
    with Progress("hashing", size, unit="B") as progress, ThreadPoolExecutor(HASHERS) as pool:

        def advance(amount: int) -> None:
            with lock:
                progress.advance(amount)

        jobs = ((name, partial(_sha256, folder / name, advance)) for name in files)
        for name, digest in in_order(pool, jobs, len(files)):
            expected = files[name]["sha256"]
            if digest != expected:
                raise UserError(
                    f"{folder / name}: is not what was written: its SHA-256 is {digest[:12]}..., "
                    f"merge.json says {expected[:12]}...",
                    AGAIN,
                )
    return size


def _sha256(path: Path, advance: Callable[[int], None]) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(HASH_BYTES):
                digest.update(block)
                advance(len(block))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}", UNREADABLE) from error
    return digest.hexdigest()


class MergedFiles:
    """The tensors of all safetensors files of a folder, read with the safetensors library.

    Args:
        folder: the merged checkpoint's folder.

    Attributes:
        files: the file of each tensor.
        shapes, dtypes: of each tensor; types by safetensors' names.

    Raises:
        UserError: when a file cannot be read, or a name is in two of them.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        self.files: dict[str, str] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, str] = {}
        self._opened: dict[str, Any] = {}
        self._offsets: dict[str, dict[str, int]] = {}
        for path in sorted(folder.glob("*.safetensors")):
            try:
                opened = safe_open(path, "numpy")
            except (OSError, SafetensorError) as error:
                raise UserError(f"{path}: cannot be read: {error}", AGAIN) from error
            self._opened[path.name] = opened
            for name in opened.keys():  # noqa: SIM118
                if name in self.files:
                    raise UserError(f"{folder}: {name} is in both {self.files[name]} and {path.name}", AGAIN)
                view = opened.get_slice(name)
                self.files[name] = path.name
                self.shapes[name] = tuple(view.get_shape())
                self.dtypes[name] = view.get_dtype()

    def path(self, name: str) -> Path:
        """Return the path of a tensor's file."""
        return self.folder / self.files[name]

    def quantized(self, name: str) -> bool:
        """Return whether a tensor is stored with a scale."""
        return self.dtypes[name] in QUANTIZED and name + SCALE in self.files

    def rows(self, name: str, rows: Rows) -> np.ndarray:
        """Return rows of a tensor in its own type: [rows, elements of a row]."""
        shape = self.shapes[name]
        opened = self._opened[self.files[name]]
        if self.dtypes[name].startswith("F8"):
            return self._mapped(name)[rows]
        if not shape:
            return np.asarray(opened.get_tensor(name)).reshape(1, 1)
        view = opened.get_slice(name)
        return np.concatenate([view[start:stop].reshape(stop - start, -1) for start, stop in runs(rows)])

    def _mapped(self, name: str) -> np.ndarray:
        """Map a tensor of a type that the library does not convert to NumPy: [rows, elements of a row]."""
        path, shape = self.path(name), self.shapes[name]
        if path.name not in self._offsets:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self._offsets[path.name] = {
                key: 8 + length + entry["data_offsets"][0] for key, entry in header.items()
            }
        offset = self._offsets[path.name][name]
        raw = np.memmap(path, np.uint8, "r", offset, (shape[0], math.prod(shape[1:])))
        return raw.view(DTYPES[self.dtypes[name]])


def check_names(base: HFCheckpoint, trained: set[str], merged: MergedFiles, dtype: str) -> None:
    """Check that the files hold each of the base's tensors once, and the scales of quantized tensors.

    Args:
        trained: names of the tensors that training changed.
        dtype: type of these tensors.

    Raises:
        UserError: naming the first tensor that is missing, is not in the base, or has another shape or type;
            or a contradiction in the index.
    """
    folder = merged.folder
    scales = {name + SCALE for name in base.tensors if name in merged.files and merged.quantized(name)}
    for name, tensor in base.tensors.items():
        if name not in merged.files:
            raise UserError(f"{folder}: holds no {name}, which the base has", AGAIN)
        if merged.shapes[name] != tensor.shape:
            raise UserError(
                f"{merged.path(name)}: {name} has shape {list(merged.shapes[name])}, the base's has "
                f"{list(tensor.shape)}",
                AGAIN,
            )
        wanted = dtype if name in trained else DTYPES[tensor.dtype].name
        found = DTYPES[merged.dtypes[name]].name
        if found != wanted and not merged.quantized(name):
            raise UserError(f"{merged.path(name)}: {name} is of type {found}, expected {wanted}", AGAIN)
    for name in sorted(merged.files.keys() - base.tensors.keys() - scales):
        raise UserError(f"{merged.path(name)}: holds {name}, which the base does not have", AGAIN)
    _check_index(merged)


def _check_index(merged: MergedFiles) -> None:
    path = merged.folder / INDEX
    if not path.is_file():
        if len(set(merged.files.values())) > 1:
            raise UserError(f"{merged.folder}: has several safetensors files and no {INDEX}", AGAIN)
        return
    try:
        index = json.loads(path.read_bytes())
        listed, total = dict(index["weight_map"]), (index.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path}: is not an index of safetensors files ({error})", AGAIN) from error
    for name in sorted(listed.keys() | merged.files.keys()):
        if listed.get(name) != merged.files.get(name):
            raise UserError(
                f"{path}: has {name} in {listed.get(name) or 'no file'}; it is in "
                f"{merged.files.get(name) or 'no file'}",
                AGAIN,
            )
    size = sum(math.prod(merged.shapes[name]) * DTYPES[merged.dtypes[name]].itemsize for name in merged.files)
    if total is not None and total != size:
        raise UserError(f"{path}: total_size is {total}, the tensors have {size} bytes", AGAIN)


def runs(rows: Rows) -> Iterable[tuple[int, int]]:
    """Return the first and last row, exclusive, of each stretch of adjacent rows."""
    for stretch in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
        yield int(stretch[0]), int(stretch[-1]) + 1
