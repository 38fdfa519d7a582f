"""Plan a merge: which tensors go into which files, with which type and size."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..weights.checkpoint import INDEX, SINGLE, HFCheckpoint
from ..weights.safetensors_files import DTYPES, encode_header
from .arithmetic import Change

if TYPE_CHECKING:
    from .compressed_tensors import Quantization

AS_BASE = "base"
"""The max_shard_size that keeps the base's own split into files."""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: its name, its type by safetensors' name, its shape and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Piece:
    """A tensor of the base, and the tensors to write for it.

    Attributes:
        name: its name in the base.
        change: the change by training, or None.
        quantized: whether it is quantized, changed or not.
        outputs: the tensors in the order of their bytes; several if it is quantized.
    """

    name: str
    change: Change | None
    quantized: bool
    outputs: tuple[OutputTensor, ...]

    @property
    def size(self) -> int:
        """Return the bytes of all outputs."""
        return sum(output.size for output in self.outputs)

    @property
    def copied(self) -> bool:
        """Return whether the base's bytes are written unchanged."""
        return self.change is None and not self.quantized


@dataclass(frozen=True)
class Shard:
    """A safetensors file to write.

    Attributes:
        file: its name.
        header: the JSON of its header, padded.
        pieces: its pieces in the order of their bytes.
    """

    file: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Return the file's size in bytes."""
        return 8 + len(self.header) + sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class MergePlan:
    """Everything that a merge writes of the weights.

    Attributes:
        shards: the files, in the order of the base's tensors.
        index: content of the index file; None if the weights are in one file.
        recast: number of changed tensors that get a new type, by the name of the base's type.
    """

    shards: tuple[Shard, ...]
    index: bytes | None
    recast: Mapping[str, int]

    @property
    def pieces(self) -> Iterator[Piece]:
        for shard in self.shards:
            yield from shard.pieces

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(shard.size for shard in self.shards)

    @property
    def merged(self) -> int:
        """Return how many of the base's tensors training changed."""
        return sum(piece.change is not None for piece in self.pieces)

    @property
    def quantized(self) -> int:
        """Return how many of the base's tensors are quantized."""
        return sum(piece.quantized for piece in self.pieces)

    @property
    def copied(self) -> int:
        """Return how many of the base's tensors stay unchanged."""
        return sum(piece.copied for piece in self.pieces)


def plan_merge(
    base: HFCheckpoint,
    changes: Mapping[str, Change],
    dtype: str | None,
    max_shard_size: str = AS_BASE,
    quantization: Quantization | None = None,
) -> MergePlan:
    """Plan a merge. Each change must have its tensor, and each tensor of the base gets a place.

    Args:
        changes: by full tensor name.
        dtype: type of the changed tensors; None keeps the base's types.
        max_shard_size: "5GB" and the like, or "base".
        quantization: quantization of the model's linear weights.
    """
    recast: Counter[str] = Counter()
    codes = {kind.name: code for code, kind in DTYPES.items()}

    def piece(name: str) -> Piece:
        tensor, change = base.tensors[name], changes.get(name)
        if quantization is not None and quantization.applies(base, name):
            outputs = (_output(*entry) for entry in quantization.outputs(name, tensor.shape))
            return Piece(name, change, True, tuple(outputs))
        code = codes[dtype] if change is not None and dtype else tensor.dtype
        if code != tensor.dtype:
            recast[tensor.dtype] += 1
        size = tensor.size if code == tensor.dtype else None
        return Piece(name, change, False, (_output(name, code, tensor.shape, size),))

    in_files = [(file, [piece(name) for name in header.tensors]) for file, header in base.headers.items()]
    if max_shard_size == AS_BASE:
        shards = tuple(_shard(base, file, pieces) for file, pieces in in_files if pieces)
        named = base.index is not None
    else:
        groups = list(_packed((p for _, pieces in in_files for p in pieces), shard_bytes(max_shard_size)))
        shards = tuple(
            _shard(base, shard_name(number, len(groups)), group) for number, group in enumerate(groups, 1)
        )
        named = len(groups) > 1
    _check_complete(base, changes, shards)
    return MergePlan(shards, _index(base, shards) if named else None, dict(recast))


def shard_bytes(size: str) -> int:
    """Return the bytes of "5GB", "2.5GB" or "100MB" (powers of ten)."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)", size)
    if match is None:
        raise ValueError(f"{size!r} is not a size such as 5GB")
    return int(float(match[1]) * UNITS[match[2]])


def shard_name(number: int, count: int) -> str:
    """Return a file's name by transformers' scheme; `number` begins at 1."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def _output(name: str, code: str, shape: tuple[int, ...], size: int | None = None) -> OutputTensor:
    if size is None:
        size = DTYPES[code].itemsize * math.prod(shape)
    return OutputTensor(name, code, tuple(shape), size)


def _packed(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Group pieces in order; each group has at most `limit` bytes or one piece."""
    group: list[Piece] = []
    size = 0
    for piece in pieces:
        if group and size + piece.size > limit:
            yield group
            group, size = [], 0
        group.append(piece)
        size += piece.size
    yield group


def _shard(base: HFCheckpoint, file: str, pieces: list[Piece]) -> Shard:
    """Plan a file. It keeps the base's header if the base's file of that name has the same content."""
    entries = {output.name: output for piece in pieces for output in piece.outputs}
    base_header = base.headers.get(file)
    if (
        base_header is not None
        and all(tensor.stored == (tensor,) for tensor in base_header.tensors.values())
        and base_header.data_start + sum(tensor.size for tensor in base_header.tensors.values())
        == base_header.size
        and [(tensor_name, tensor.dtype, tensor.shape) for tensor_name, tensor in base_header.tensors.items()]
        == [(output.name, output.dtype, output.shape) for output in entries.values()]
    ):
        return Shard(file, base_header.raw, tuple(pieces))
    metadata = next(iter(base.headers.values())).metadata if base_header is None else base_header.metadata
    header = {name: (output.dtype, output.shape, output.size) for name, output in entries.items()}
    return Shard(file, encode_header(header, metadata), tuple(pieces))


def _index(base: HFCheckpoint, shards: tuple[Shard, ...]) -> bytes:
    """Return the index of the shards; the base's own bytes if nothing changes."""
    weight_map = {
        output.name: shard.file for shard in shards for piece in shard.pieces for output in piece.outputs
    }
    total = sum(piece.size for shard in shards for piece in shard.pieces)
    index: dict[str, Any] = json.loads(base.side_file(INDEX)) if base.index is not None else {}
    metadata = dict(index.get("metadata") or {})
    if index.get("weight_map") == weight_map and metadata.get("total_size", total) == total:
        return base.side_file(INDEX)
    index = {"metadata": {**metadata, "total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return (json.dumps(index, indent=2) + "\n").encode()


def _check_complete(base: HFCheckpoint, changes: Mapping[str, Change], shards: Iterable[Shard]) -> None:
    """Assert that every tensor is written once and every change is used once."""
    pieces = [piece for shard in shards for piece in shard.pieces]
    written = Counter(output.name for piece in pieces for output in piece.outputs)
    used = Counter(piece.name for piece in pieces if piece.change is not None)
    if Counter(piece.name for piece in pieces) != Counter(list(base.tensors)) or max(written.values()) > 1:
        raise AssertionError("a tensor is written twice, or not at all")
    if used != Counter(list(changes)):
        raise AssertionError(f"changes not used once: {sorted(set(changes) ^ set(used))}")
