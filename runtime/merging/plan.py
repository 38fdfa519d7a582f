"""What a merge will write: which tensors into which files, of which type and size."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..weights.checkpoint import INDEX, SINGLE, HFCheckpoint
from ..weights.safetensors_files import DTYPES, encode_header
from .arithmetic import Change

if TYPE_CHECKING:
    from .quantized import Quantization

AS_BASE = "base"
"""The max_shard_size that keeps the base's own split into files."""
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class OutputTensor:
    """A tensor that is written: its name, its type as safetensors names it, its shape and bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass(frozen=True)
class Piece:
    """A tensor of the base, and what is written for it.

    Attributes:
        name: in the base.
        change: what training did to it, None for nothing.
        quantized: whether it is quantized, whatever else was done to it.
        outputs: in the order of their bytes; several where it is quantized.
    """

    name: str
    change: Change | None
    quantized: bool
    outputs: tuple[OutputTensor, ...]

    @property
    def size(self) -> int:
        """Bytes of all outputs."""
        return sum(output.size for output in self.outputs)

    @property
    def copied(self) -> bool:
        """Whether the base's bytes are written as they are."""
        return self.change is None and not self.quantized


@dataclass(frozen=True)
class Shard:
    """A safetensors file that is written.

    Attributes:
        file: its name.
        header: the JSON of its header, padded.
        pieces: in the order of their bytes.
    """

    file: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return 8 + len(self.header) + sum(piece.size for piece in self.pieces)


@dataclass(frozen=True)
class MergePlan:
    """All that a merge writes of the weights.

    Attributes:
        shards: in the order of the base's tensors.
        index: content of the index file, None for weights in one file.
        recast: numbers of changed tensors whose type is not the base's, by its old name.
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
        """Bytes of all files."""
        return sum(shard.size for shard in self.shards)

    @property
    def merged(self) -> int:
        """Number of the base's tensors that training changed."""
        return sum(piece.change is not None for piece in self.pieces)

    @property
    def quantized(self) -> int:
        """Number of the base's tensors that are quantized."""
        return sum(piece.quantized for piece in self.pieces)

    @property
    def copied(self) -> int:
        """Number of the base's tensors that stay as they are."""
        return sum(piece.copied for piece in self.pieces)


def plan_merge(
    base: HFCheckpoint,
    changes: Mapping[str, Change],
    dtype: str | None,
    max_shard_size: str = AS_BASE,
    quantization: Quantization | None = None,
) -> MergePlan:
    """Plans a merge; each change has its tensor, and each tensor of the base has its place.

    Args:
        changes: by the full name of the tensor.
        dtype: of the tensors that change; their own in the base when None.
        max_shard_size: "5GB" and the like, or "base".
        quantization: of the model's linear weights.

    Raises:
        UserError: when a change has no tensor, or one of another shape.
    """
    check_changes(base, changes)
    recast: Counter[str] = Counter()

    def piece(name: str) -> Piece:
        tensor, change = base.tensors[name], changes.get(name)
        if quantization is not None and quantization.applies(base, name):
            outputs = (_output(*entry) for entry in quantization.outputs(name, tensor.shape))
            return Piece(name, change, True, tuple(outputs))
        code = code_of(dtype) if change is not None and dtype else tensor.dtype
        if code != tensor.dtype:
            recast[tensor.dtype] += 1
        size = tensor.size if code == tensor.dtype else None
        return Piece(name, change, False, (_output(name, code, tensor.shape, size),))

    in_files = [(file, [piece(name) for name in header.tensors]) for file, header in base.headers.items()]
    if max_shard_size == AS_BASE:
        shards = tuple(_shard(base, file, pieces) for file, pieces in in_files)
        named = base.index is not None
    else:
        groups = list(_packed((p for _, pieces in in_files for p in pieces), shard_bytes(max_shard_size)))
        shards = tuple(
            _shard(base, shard_name(number, len(groups)), group) for number, group in enumerate(groups, 1)
        )
        named = len(groups) > 1
    _check_complete(base, changes, shards)
    return MergePlan(shards, _index(base, shards) if named else None, dict(recast))


def check_changes(base: HFCheckpoint, changes: Mapping[str, Change]) -> None:
    """Checks that each change has its tensor in the base.

    Raises:
        UserError: naming the first that has not.
    """
    for name, change in changes.items():
        tensor = base.tensors.get(name)
        if tensor is None:
            raise UserError(
                f"{base.name}: no {name}, which an adapter was trained for",
                "give the base checkpoint of the run with --model",
            )
        if tensor.shape != change.shape:
            raise UserError(
                f"{base.name}/{tensor.file}: {name} has shape {list(tensor.shape)}; "
                f"its adapter was trained for {list(change.shape)}",
                "give the base checkpoint of the run with --model",
            )


def shard_bytes(size: str) -> int:
    """Bytes of "5GB", "2.5GB" or "100MB" (powers of ten).

    Raises:
        ValueError: on another spelling.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMG]B)", size)
    if match is None:
        raise ValueError(f"{size!r} is no size such as 5GB")
    return int(float(match[1]) * UNITS[match[2]])


def shard_name(number: int, count: int) -> str:
    """A file's name as transformers gives it; `number` begins at 1."""
    return SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"


def code_of(dtype: str) -> str:
    """safetensors' name of an element type: "BF16" for "bfloat16"."""
    return next(code for code, kind in DTYPES.items() if kind.name == dtype)


def _output(name: str, code: str, shape: tuple[int, ...], size: int | None = None) -> OutputTensor:
    if size is None:
        size = DTYPES[code].itemsize
        for length in shape:
            size *= length
    return OutputTensor(name, code, tuple(shape), size)


def _packed(pieces: Iterable[Piece], limit: int) -> Iterator[list[Piece]]:
    """Groups of pieces in order, each of at most `limit` bytes or of one piece."""
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
    """A file; with the base's own header where it holds what the base's file of that name holds."""
    entries = {output.name: output for piece in pieces for output in piece.outputs}
    own = base.headers.get(file)
    if (
        own is not None
        and all(tensor.stored == (tensor,) for tensor in own.tensors.values())
        and [(tensor_name, tensor.dtype, tensor.shape) for tensor_name, tensor in own.tensors.items()]
        == [(output.name, output.dtype, output.shape) for output in entries.values()]
    ):
        return Shard(file, own.raw, tuple(pieces))
    metadata = next(iter(base.headers.values())).metadata if own is None else own.metadata
    header = {name: (output.dtype, output.shape, output.size) for name, output in entries.items()}
    return Shard(file, encode_header(header, metadata), tuple(pieces))


def _index(base: HFCheckpoint, shards: tuple[Shard, ...]) -> bytes:
    """The index of the shards; the base's own bytes where nothing in it changes."""
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
    """Asserts that every tensor is written once and every change is used once."""
    pieces = [piece for shard in shards for piece in shard.pieces]
    written = Counter(output.name for piece in pieces for output in piece.outputs)
    used = Counter(piece.name for piece in pieces if piece.change is not None)
    if Counter(piece.name for piece in pieces) != Counter(list(base.tensors)) or max(written.values()) > 1:
        raise AssertionError("a tensor is written twice, or not at all")
    if used != Counter(list(changes)):
        raise AssertionError(f"changes not used once: {sorted(set(changes) ^ set(used))}")
