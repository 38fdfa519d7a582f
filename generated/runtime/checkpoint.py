"""Reads Hugging Face checkpoints: a folder of config.json and safetensors, in one file or many.

Only the headers are read when a checkpoint is opened; tensors are mapped from their files when they
are asked for. Nothing here imports jax.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from runtime.contradictions import AGAIN as _AGAIN
from runtime.contradictions import config_keys, foreign, layer_of
from runtime.errors import UserError
from runtime.families import Architecture, Family, UnsupportedCheckpoint, family_of
from runtime.families.base import Source, text_config
from runtime.settings import ModelSettings

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
EMBEDDING = "embed_tokens.weight"
"""The text tensor that every family has; what stands before it is the checkpoint's prefix."""
HEAD = "lm_head.weight"

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
FLOATING = ("F64", "F32", "F16", "BF16")

MAX_HEADER = 100_000_000
"""Bytes; the limit that the safetensors library sets."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
SIDE_FOLDERS = ("additional_chat_templates",)
DOWNLOAD = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "NOTICE*", "README.md")


@dataclass(frozen=True)
class Tensor:
    """Where a tensor lies: its file, its element type as safetensors names it, its bytes in the file."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a safetensors file.

    Attributes:
        raw: its JSON as it stands in the file, padding included.
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


@dataclass(frozen=True)
class BaseCheckpoint:
    """A checkpoint of a known family, opened for reading.

    Attributes:
        directory: its folder.
        config: config.json.
        prefix: of the text tensors, e.g. "model.language_model.".
        tensors: every tensor of every file by its full name.
        headers: of each safetensors file by its name in the folder, sorted.
        index: the file name of the index, None for a checkpoint in one file.
        side_files: everything else that belongs to it (tokenizer, generation config, chat template,
            licence), config.json included; names relative to `directory`.
    """

    directory: Path
    config: Mapping[str, Any]
    family: Family
    architecture: Architecture
    prefix: str
    tensors: Mapping[str, Tensor]
    headers: Mapping[str, Header]
    index: str | None
    side_files: tuple[str, ...]
    _maps: dict[str, mmap.mmap] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def open(cls, directory: Path) -> BaseCheckpoint:
        """Reads config.json, the index and every file's header.

        Raises:
            UserError: when the folder is no checkpoint, its family is not known, a file is missing or
                truncated, or the index names what is not there.
        """
        directory = Path(directory)
        config = read_config(directory)
        try:
            family = family_of(config)
            architecture = family.architecture(config)
        except UnsupportedCheckpoint as error:
            raise UserError(f"{directory}: {error}") from error
        names, index = _weight_files(directory)
        headers = {name: read_header(directory / name) for name in names}
        tensors: dict[str, Tensor] = {}
        for header in headers.values():
            for name, tensor in header.tensors.items():
                if name in tensors:
                    files = f"{tensors[name].file} and {tensor.file}"
                    raise UserError(f"{directory}: {name} is in both {files}", _AGAIN)
                tensors[name] = tensor
        if index is not None:
            _check_index(directory, tensors, _weight_map(directory))
        prefix = next((p for p in family.prefixes if p + EMBEDDING in tensors), None)
        if prefix is None:
            looked_for = ", ".join(p + EMBEDDING for p in family.prefixes)
            raise UserError(
                f"{directory}: no text embedding among its {len(tensors)} tensors (looked for {looked_for})",
                "this is not a checkpoint in Hugging Face's layout for the family "
                f"{family.name!r} that its config.json names",
            )
        side_files = _side_files(directory)
        for name in side_files:
            if name.endswith(".json"):
                with (directory / name).open("rb") as file:
                    _check_kind(directory / name, file.read(512))
        return cls(directory, config, family, architecture, prefix, tensors, headers, index, side_files)

    @property
    def files(self) -> tuple[str, ...]:
        """Names of the safetensors files."""
        return tuple(self.headers)

    @property
    def total_bytes(self) -> int:
        """Size of all safetensors files."""
        return sum(header.size for header in self.headers.values())

    def names(self) -> dict[str, str]:
        """The file of each tensor."""
        return {name: tensor.file for name, tensor in self.tensors.items()}

    def has(self, name: str) -> bool:
        return name in self.tensors

    def metadata(self, file: str) -> dict[str, str]:
        """The metadata of a safetensors file."""
        return dict(self.headers[file].metadata)

    def read(self, name: str) -> np.ndarray:
        """A tensor by its full name: a read-only array that is mapped from its file.

        Raises:
            UserError: when there is none of that name, or its element type is not known.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise UserError(f"{self.directory}: no tensor {name}")
        if tensor.dtype not in DTYPES:
            raise UserError(f"{self.directory / tensor.file}: {name} has the unknown type {tensor.dtype}")
        flat = np.frombuffer(self.bytes_of(name), DTYPES[tensor.dtype])
        return flat.reshape(tensor.shape)

    def bytes_of(self, name: str) -> memoryview:
        """The bytes of a tensor, mapped from its file."""
        tensor = self.tensors[name]
        if tensor.file not in self._maps:
            with (self.directory / tensor.file).open("rb") as file:
                self._maps[tensor.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return memoryview(self._maps[tensor.file])[tensor.start : tensor.end]

    def release(self, name: str) -> None:
        """Lets the system take back the memory of a tensor that was read and is not needed soon."""
        tensor = self.tensors[name]
        page = mmap.PAGESIZE
        first = -(-tensor.start // page) * page
        length = tensor.end // page * page - first
        if tensor.file in self._maps and length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._maps[tensor.file].madvise(mmap.MADV_DONTNEED, first, length)

    def read_source(self, source: Source) -> np.ndarray:
        """The tensor of a source, as the file holds it (not yet in Tunix's layout).

        Raises:
            UserError: when it is absent or has another shape than the family expects.
        """
        self._check(source)
        return self.read(source.full_name(self.prefix))

    def verify(self) -> None:
        """Checks that every tensor that the model is made of is there, with its shape.

        Raises:
            UserError: naming the first one that is not, its file, the expected and the found shape.
        """
        used = set()
        for parameter in self.family.parameters(self.architecture):
            for source in parameter.sources:
                self._check(source)
                used.add(source.full_name(self.prefix))
        text = text_config(self.config)
        layers = self.architecture.num_layers
        for name, tensor in self.tensors.items():
            layer = layer_of(name.removeprefix(self.prefix)) if name.startswith(self.prefix) else None
            if layer is not None and layer >= layers:
                raise UserError(
                    f"{self.directory / tensor.file}: {name} is of layer {layer}, "
                    f"and {CONFIG} has num_hidden_layers {layers}, which ends at layer {layers - 1}",
                    f"{CONFIG} and the weights must be of one checkpoint",
                )
        tied = text.get("tie_word_embeddings", self.config.get("tie_word_embeddings", True))
        head = next((name for name in (HEAD, f"language_model.{HEAD}") if self.has(name)), None)
        if head is not None and head not in used and tied is False:
            raise UserError(
                f"{self.directory / self.tensors[head].file}: {head} is a weight of its own "
                "(tie_word_embeddings is false); Tunix's model uses the embedding"
            )

    def unused(self) -> list[str]:
        """Text tensors that no parameter of the Tunix model is made of, sorted, by full name."""
        used = {
            source.full_name(self.prefix)
            for parameter in self.family.parameters(self.architecture)
            for source in parameter.sources
        }
        return sorted(name for name in self.tensors if name.startswith(self.prefix) and name not in used)

    def _check(self, source: Source) -> None:
        name = source.full_name(self.prefix)
        tensor = self.tensors.get(name)
        if tensor is None:
            raise UserError(
                f"{self.directory}: {name} is missing; {CONFIG} promises it with shape {list(source.shape)}",
                f"its files are {', '.join(self.files)}",
            )
        if tensor.shape != source.shape:
            keys = config_keys(text_config(self.config), name, source.shape, tensor.shape)
            raise UserError(
                f"{self.directory / tensor.file}: {name} has shape {list(tensor.shape)}, "
                f"expected {list(source.shape)} from {CONFIG}" + (f" ({keys})" if keys else ""),
                f"{CONFIG} and the weights must be of one checkpoint",
            )
        if tensor.dtype not in FLOATING:
            raise UserError(
                f"{self.directory / tensor.file}: {name} has type {tensor.dtype}, which is no float",
                "quantised checkpoints cannot be trained or merged; use the original one",
            )


def read_config(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        UserError: when the folder or the file is missing, or it is not a JSON object.
    """
    path = directory / CONFIG
    if not directory.is_dir():
        raise UserError(
            f"{directory}: no such folder", "--model takes a folder of config.json and safetensors"
        )
    if not path.is_file():
        raise UserError(f"{directory}: no {CONFIG}", "--model takes a folder of config.json and safetensors")
    return _read_json(path)


def read_header(path: Path) -> Header:
    """The header of a safetensors file; checks that every tensor lies within the file.

    Raises:
        UserError: when the file is missing, truncated or not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            file.seek(0)
            _check_kind(path, file.read(512))
            file.seek(8)
            if size < 8 or length > MAX_HEADER:
                raise UserError(f"{path}: not a safetensors file", _AGAIN)
            if 8 + length > size:
                raise UserError(f"{path}: truncated within its header ({size} of {8 + length} bytes)", _AGAIN)
            raw = file.read(length)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", _AGAIN) from error
    try:
        fields = json.loads(raw)
        metadata = fields.pop("__metadata__", {})
        entries = sorted(fields.items(), key=lambda item: item[1]["data_offsets"])
        tensors = {
            name: Tensor(
                path.name,
                entry["dtype"],
                tuple(entry["shape"]),
                8 + length + entry["data_offsets"][0],
                8 + length + entry["data_offsets"][1],
            )
            for name, entry in entries
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(f"{path}: its header is not that of a safetensors file ({error})", _AGAIN) from error
    expected = 8 + length
    for name, tensor in tensors.items():
        dtype = DTYPES.get(tensor.dtype)
        wrong_size = (
            dtype is not None and math.prod(tensor.shape) * dtype.itemsize != tensor.end - tensor.start
        )
        if wrong_size or tensor.start != expected or tensor.end < tensor.start:
            raise UserError(
                f"{path}: its header gives {name} bytes that do not fit its shape or place", _AGAIN
            )
        expected = tensor.end
    if expected > size:
        raise UserError(f"{path}: truncated: {size} bytes, {expected} expected", _AGAIN)
    if expected < size:
        raise UserError(f"{path}: {size - expected} bytes after the last tensor", _AGAIN)
    return Header(raw, tensors, metadata, size)


def locate_model(model: ModelSettings, override: Path | str | None = None) -> Path:
    """The folder of a model's checkpoint on this machine; downloads it when need be.

    Args:
        model: `id` is a Hugging Face id, a folder ("./...", "/...", "~/...") or a bucket ("gs://...").
        override: a folder or bucket that is used instead (--model).

    Raises:
        UserError: when there is no such folder, or it cannot be downloaded.
    """
    given = str(override) if override is not None else model.id
    if "://" in given:
        return _fetch_bucket(given)
    if override is not None or given.startswith((".", "/", "~")):
        directory = Path(given).expanduser()
        if not directory.is_dir():
            raise UserError(
                f"{given}: no such folder", "--model DIR says where the base checkpoint lies on this machine"
            )
        return directory
    return _download(model.id, model.revision)


def _download(repository: str, revision: str | None) -> Path:
    import huggingface_hub
    from huggingface_hub import errors

    where = f"{repository} ({revision})" if revision else repository
    try:
        return Path(
            huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=list(DOWNLOAD))
        )
    except errors.GatedRepoError as error:
        raise UserError(
            f"{where}: Hugging Face asks for its terms to be accepted",
            f"accept them on https://huggingface.co/{repository}, then set HF_TOKEN",
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{where}: Hugging Face has no such model, or it is private",
            "check model.id; set HF_TOKEN for a private model; or give a folder with --model DIR",
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(f"{where}: no such revision on Hugging Face", "check model.revision") from error
    except (errors.HfHubHTTPError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise UserError(
            f"{where}: could not be downloaded ({str(error).splitlines()[0]})",
            "check the connection, or give a downloaded folder with --model DIR",
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where}: could not be downloaded ({error})", "give a downloaded folder with --model DIR"
        ) from error


def _fetch_bucket(url: str) -> Path:
    """Copies a checkpoint from a bucket into the user's cache; files that are there whole are kept."""
    import hashlib

    import fsspec

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "recipec"
    target = cache / f"{url.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    try:
        system, root = fsspec.core.url_to_fs(url)
        entries = [entry for entry in system.ls(root, detail=True) if entry["type"] == "file"]
        target.mkdir(parents=True, exist_ok=True)
        for entry in sorted(entries, key=lambda entry: str(entry["name"])):
            name = str(entry["name"]).rpartition("/")[2]
            copy = target / name
            if copy.is_file() and copy.stat().st_size == entry["size"]:
                continue
            part = target / f".{name}.part"
            with system.open(entry["name"], "rb") as source, part.open("wb") as sink:
                shutil.copyfileobj(source, sink, 1 << 24)
            part.replace(copy)
    except ImportError as error:
        raise UserError(f"{url}: {error}", "gs:// needs the package gcsfs") from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{url}: could not be copied ({error})", "check the address and your access"
        ) from error
    return target


def _weight_files(directory: Path) -> tuple[list[str], str | None]:
    """Names of the safetensors files, and of the index when there are several."""
    if (directory / SINGLE).is_file():
        return [SINGLE], None
    if (directory / INDEX).is_file():
        names = sorted(set(_weight_map(directory).values()))
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise UserError(
                f"{directory}: {', '.join(missing)} missing; {INDEX} names {len(names)} files", _AGAIN
            )
        return names, INDEX
    found = sorted(path.name for path in directory.iterdir() if path.name.endswith(WEIGHT_SUFFIXES))
    if any(name.endswith(".safetensors") for name in found):
        raise UserError(f"{directory}: several safetensors files and no {INDEX}", _AGAIN)
    raise UserError(
        f"{directory}: neither {SINGLE} nor {INDEX}"
        + (f"; {', '.join(found[:3])} is in another format" if found else ""),
        "save the checkpoint as safetensors",
    )


def _weight_map(directory: Path) -> dict[str, str]:
    weight_map = _read_json(directory / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{directory / INDEX}: no weight_map", _AGAIN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise UserError(
                f"{directory / INDEX}: {name} is in {file!r}, not in a file of this folder", _AGAIN
            )
    return weight_map


def _check_index(directory: Path, tensors: Mapping[str, Tensor], weight_map: Mapping[str, str]) -> None:
    for name, file in sorted(weight_map.items()):
        if name not in tensors:
            raise UserError(f"{directory / INDEX}: names {name}, which {file} does not hold", _AGAIN)
        if tensors[name].file != file:
            raise UserError(
                f"{directory / INDEX}: names {name} in {file}; it is in {tensors[name].file}", _AGAIN
            )


def _side_files(directory: Path) -> tuple[str, ...]:
    def keep(path: Path) -> bool:
        hidden = path.name.startswith(".")
        return (
            path.is_file() and not hidden and path.name != INDEX and not path.name.endswith(WEIGHT_SUFFIXES)
        )

    out = [path.name for path in directory.iterdir() if keep(path)]
    for folder in SIDE_FOLDERS:
        if (directory / folder).is_dir():
            out += [f"{folder}/{path.name}" for path in (directory / folder).iterdir() if keep(path)]
    return tuple(sorted(out))


def _check_kind(path: Path, head: bytes) -> None:
    """Raises UserError when the first bytes of a file show that it is something else."""
    other = foreign(head)
    if other is not None:
        raise UserError(f"{path}: is {other[0]}", other[1])


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = path.read_bytes()
        _check_kind(path, content[:512])
        value = json.loads(content)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}", _AGAIN) from error
    except ValueError as error:
        raise UserError(f"{path}: not JSON ({error})", _AGAIN) from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: not a JSON object", _AGAIN)
    return value
