"""Read Hugging Face checkpoints: a folder of config.json and one or more safetensors files.

Opening a checkpoint reads only the headers. Tensors are read on request: mapped from local files, or by
ranged reads from an address. Nothing here imports jax.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import numpy as np

from ..errors import UserError
from ..model.families import Architecture, Family, UnsupportedCheckpoint, family_of
from ..model.families.family import Source
from .added_rows import grown
from .agreement import (
    CONFIG,
    ORIGINAL,
    Fault,
    embeddings,
    fault_of,
    faults,
    prefix_of,
    same_values,
    spare_head,
    untied,
)
from .files import AGAIN, Files, json_object
from .headers import KIND, Header, Tensor, check_kind, files_of, read_header
from .quantized_formats import format_of, plain, read_unpacked
from .safetensors_files import DTYPES

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_JSON = 1 << 26
"""The most bytes of config.json and of the index; a megabyte or two are usual."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")

Known = TypeVar("Known")


@dataclass(frozen=True)
class HFCheckpoint:
    """A checkpoint of a known family, opened for reading.

    Attributes:
        store: the files of its folder.
        config: config.json, without the description of stored quantization. `tie_word_embeddings` is false
            if the files hold a head of other values than the embedding.
        prefix: prefix of the text tensors, e.g. "model.language_model.".
        tensors: every tensor of every file by its full name; quantized ones as the tensor they represent.
        headers: the header of each safetensors file by its name in the folder, sorted, with the same tensors.
        index: the file name of the index; None for a checkpoint in one file.
        side_files: everything else that belongs to it (tokenizer, generation config, chat template,
            license), config.json included; names relative to its folder.
        copies: tensors that repeat another one, with that one's name: a head that is the embedding.
        own_head: a head of other values than the embedding, if config.json says that it is the embedding.
    """

    store: Files
    config: Mapping[str, Any]
    family: Family
    architecture: Architecture
    prefix: str
    tensors: Mapping[str, Tensor]
    headers: Mapping[str, Header]
    index: str | None
    side_files: tuple[str, ...]
    copies: Mapping[str, str] = field(default_factory=dict)
    own_head: str | None = None

    @classmethod
    def open(cls, directory: Path | str) -> HFCheckpoint:
        """Open a checkpoint: read config.json, the index and every file's header.

        Args:
            directory: a folder on this machine, or an address that fsspec knows ("gs://bucket/folder").

        Raises:
            UserError: when the folder is not a checkpoint, its family is unknown, a file is missing or
                truncated, the index names a missing tensor or file, or the address cannot be read.
        """
        store = files_of(directory)
        config = read_config(store)
        family = _described(store, lambda: family_of(config))
        form = _described(store, lambda: format_of(family, config))
        if family.tunix:  # checked before any header is read, in case the config is wrong
            _described(store, lambda: family.architecture(config))
        names, index = _weight_files(store)
        headers = {name: read_header(store, name) for name in names}
        tensors: dict[str, Tensor] = {}
        for header in headers.values():
            for name, tensor in header.tensors.items():
                if name in tensors:
                    files = f"{tensors[name].file} and {tensor.file}"
                    raise UserError(f"{store.name}: {name} is in both {files}", AGAIN)
                tensors[name] = tensor
        if index is not None:
            _check_index(store, tensors)
        if form is not None:
            tensors, config = read_unpacked(store, form, tensors), plain(config)
            for name, header in headers.items():
                in_file = {key: tensor for key, tensor in tensors.items() if tensor.file == name}
                headers[name] = replace(header, tensors=in_file)
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        architecture = _described(store, lambda: family.architecture_of(config, shapes))
        prefix = prefix_of(family, tensors)
        if prefix is None:
            looked_for = ", ".join(name for _, name in embeddings(family))
            raise UserError(
                f"{store.name}: no text embedding among its {len(tensors)} tensors (looked for {looked_for})",
                "this is not a checkpoint in Hugging Face's layout for the family "
                f"{family.name!r} that its config.json names",
            )
        copies, own_head = dict[str, str](), None
        if (pair := spare_head(family, architecture, tensors, prefix)) is not None:
            head, embedding = pair
            if same_values(store, tensors[head], tensors[embedding]):
                copies = {head: embedding}
            else:
                config, own_head = untied(config), head
                architecture = _with_own_head(store, family, config, shapes, tensors[head], pair)
        side_files = _side_files(store)
        refuse_links(store, side_files)
        for name in side_files:
            if name.endswith(".json"):
                check_kind(store.path(name), store.read(name, 0, min(KIND, store.sizes[name])))
        return cls(
            store,
            config,
            family,
            architecture,
            prefix,
            tensors,
            headers,
            index,
            side_files,
            copies,
            own_head,
        )

    def grown(self, rows: int | None) -> HFCheckpoint:
        """Return the checkpoint with this many rows in its embedding and head, None for its own number.

        Raises:
            UserError: when it has more rows.
        """
        if rows is None or rows == self.architecture.vocab_size:
            return self
        return grown(self, rows)

    def seeing(self) -> HFCheckpoint:
        """Return the checkpoint with its vision tower among the arrays of its model.

        Raises:
            UserError: when it has none that is computed here.
        """
        seeing = _described(
            self.store, lambda: self.family.seeing(self.architecture, self.config, self.tensors)
        )
        if seeing is None:
            raise UserError(
                f"{self.name}: its config.json describes no vision tower that is computed here",
                "the recipe has data.images: give the multimodal checkpoint of its model.id",
            )
        return replace(self, architecture=seeing)

    @property
    def name(self) -> str:
        """Return its name for messages: its folder, or its address."""
        return self.store.name

    @property
    def directory(self) -> Path | None:
        """Return its local folder, None if it is at an address."""
        return self.store.folder

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of the safetensors files."""
        return tuple(self.headers)

    def read(self, name: str) -> np.ndarray:
        """Read a tensor by its full name: a read-only array that is mapped from its file.

        Raises:
            UserError: when there is no tensor of that name, or its element type is unknown.
        """
        return self._array(name).reshape(self.tensors[name].shape)

    def _array(self, name: str, start: int = 0, end: int | None = None) -> np.ndarray:
        """Return the values of a tensor's bytes [start:end), on one axis."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise UserError(f"{self.name}: no tensor {name}", "is it the checkpoint that the run began with?")
        if tensor.dtype not in DTYPES:
            raise UserError(
                f"{self.store.path(tensor.file)}: {name} has the unknown type {tensor.dtype}", ORIGINAL
            )
        return np.frombuffer(self.bytes_of(name, start, end), DTYPES[tensor.dtype])

    def bytes_of(self, name: str, start: int = 0, end: int | None = None) -> memoryview:
        """Return the bytes [start:end) of a tensor, by default to its end: mapped if local, else by a ranged
        read; for a quantized tensor, decoded.

        This may be called from several threads at once.

        Raises:
            UserError: when they cannot be read.
        """
        tensor = self.tensors[name]
        stop = tensor.size if end is None else min(end, tensor.size)
        return tensor.bytes_of(self.store.view, start, stop)

    def side_file(self, name: str) -> bytes:
        """Return the content of one of its side files, or of its index.

        Raises:
            UserError: when it cannot be read.
        """
        return self.store.read(name)

    @property
    def dequantized(self) -> tuple[str, ...]:
        """Return the tensors that are stored quantized."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.form)

    def config_file(self) -> bytes:
        """Return config.json for these tensors: without the description of stored quantization, with their
        number of rows, and with `tie_word_embeddings` as transformers loads them."""
        content = self.side_file(CONFIG)
        return (
            content
            if self.config == json.loads(content)
            else (json.dumps(self.config, indent=2) + "\n").encode()
        )

    def release(self, name: str, forget: bool = False) -> None:
        """Let the system reclaim the memory of a tensor that was read and is not needed soon.

        Args:
            forget: also drop it from the system's disk cache, for data that is read once.
        """
        for tensor in self.tensors[name].stored:
            self.store.release(tensor.file, tensor.start, tensor.end, forget)

    def read_rows(self, source: Source, start: int, stop: int) -> np.ndarray:
        """Read the rows [start:stop) of a source's tensor in its `reshape` form, not yet transposed.

        Raises:
            UserError: when it is absent or its shape differs from the family's.
        """
        fault = fault_of(source, self.prefix, self.tensors)
        if fault is not None:
            raise self._refused(fault)
        name, (count, *rest) = source.full_name(self.prefix), source.reshape
        row = self.tensors[name].size // max(1, count)
        return self._array(name, start * row, stop * row).reshape(stop - start, *rest)

    def verify(self) -> None:
        """Check that every tensor of the model exists with its shape.

        Raises:
            UserError: naming the first wrong one, its file, the expected and the found shape.
        """
        fault = next(faults(self.family, self.architecture, self.config, self.tensors, self.prefix), None)
        if fault is not None:
            raise self._refused(fault)

    def unused(self) -> list[str]:
        """Return text tensors that no parameter of the model uses, sorted, by full name."""
        used = {
            source.full_name(self.prefix)
            for parameter in self.family.parameters(self.architecture)
            for source in parameter.sources
        }
        return sorted(name for name in self.tensors if name.startswith(self.prefix) and name not in used)

    def _refused(self, fault: Fault) -> UserError:
        where = self.name if fault.file is None else self.store.path(fault.file)
        return UserError(f"{where}: {fault.text}", fault.help or f"its files are {', '.join(self.files)}")


def _with_own_head(
    store: Files,
    family: Family,
    config: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Tensor,
    names: tuple[str, str],
) -> Architecture:
    """Return the architecture of a checkpoint whose head differs from its embedding.

    Args:
        config: from `untied`.
        stored: the head.
        names: the head's and the embedding's.

    Raises:
        UserError: when the family's model has no head of its own.
    """
    try:
        return family.architecture_of(config, shapes)
    except UnsupportedCheckpoint as error:
        raise UserError(
            f"{store.path(stored.file)}: {names[0]} has other values than {names[1]}, so transformers does "
            f"not tie the two, whatever {CONFIG} says; the model of {family.title} has no head of its own",
            "such a checkpoint cannot be trained; use one whose output is the embedding, as published",
        ) from error


def _described(store: Files, read: Callable[[], Known]) -> Known:
    """Return a family's description of a config.json, which may contain anything."""
    try:
        return read()
    except UnsupportedCheckpoint as error:
        raise UserError(
            f"{store.name}: {error}", "give a checkpoint of the model that the recipe names"
        ) from error
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UserError(f"{store.path(CONFIG)}: a value is of the wrong type: {error}", AGAIN) from error


def read_config(store: Files) -> dict[str, Any]:
    """Read a checkpoint's config.json.

    Raises:
        UserError: when the folder or the file is missing, or the file is not a JSON object.
    """
    if CONFIG not in store.sizes:
        missing = f"no {CONFIG}" if store.exists else "no such folder"
        raise UserError(f"{store.name}: {missing}", "--model takes a folder of config.json and safetensors")
    return _read_json(store, CONFIG)


def _weight_files(store: Files) -> tuple[list[str], str | None]:
    """Return the names of the safetensors files, and of the index if there are several."""
    if SINGLE in store.sizes:
        return [SINGLE], None
    if INDEX in store.sizes:
        names = sorted(set(_weight_map(store).values()))
        missing = [name for name in names if name not in store.sizes]
        if missing:
            raise UserError(
                f"{store.name}: {', '.join(missing)} missing; {INDEX} names {len(names)} files", AGAIN
            )
        return names, INDEX
    weights = sorted(name for name in store.sizes if "/" not in name and name.endswith(WEIGHT_SUFFIXES))
    if any(name.endswith(".safetensors") for name in weights):
        raise UserError(f"{store.name}: several safetensors files and no {INDEX}", AGAIN)
    raise UserError(
        f"{store.name}: neither {SINGLE} nor {INDEX}"
        + (f"; {', '.join(weights[:3])} is in another format" if weights else ""),
        "save the checkpoint as safetensors",
    )


def _weight_map(store: Files) -> dict[str, str]:
    weight_map = _read_json(store, INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{store.path(INDEX)}: no weight_map", AGAIN)
    for name, file in weight_map.items():
        if not isinstance(file, str) or PurePosixPath(file).name != file:
            raise UserError(
                f"{store.path(INDEX)}: {name} is in {file!r}, not in a file of this folder", AGAIN
            )
    return weight_map


def _check_index(store: Files, tensors: Mapping[str, Tensor]) -> None:
    for name, file in sorted(_weight_map(store).items()):
        if name not in tensors:
            raise UserError(f"{store.path(INDEX)}: names {name}, which {file} does not hold", AGAIN)
        if tensors[name].file != file:
            raise UserError(
                f"{store.path(INDEX)}: names {name} in {file}; it is in {tensors[name].file}", AGAIN
            )


def _side_files(store: Files) -> tuple[str, ...]:
    def keep(name: str) -> bool:
        hidden = PurePosixPath(name).name.startswith(".")
        return not hidden and name != INDEX and not name.endswith(WEIGHT_SUFFIXES)

    return tuple(sorted(filter(keep, store.sizes)))


def refuse_links(store: Files, names: Iterable[str]) -> None:
    """Refuse links, because the merge copies side files: a link may lead to any file of the machine.

    Links in the hub's cache are allowed: they lead to blobs in the same cache.
    """
    if store.folder is None:
        return
    root = Path(os.path.realpath(store.folder))
    home = root.parents[2] if root.parent.name == "snapshots" and len(root.parents) > 2 else root
    for name in names:
        real = Path(os.path.realpath(store.folder / name))
        if not real.is_relative_to(home):
            raise UserError(
                f"{store.path(name)}: is a link to {real}, which is not part of the checkpoint",
                "replace the link with a copy of the file: merge.py copies it next to the merged weights",
            )


def _read_json(store: Files, name: str) -> dict[str, Any]:
    if store.sizes[name] > MAX_JSON:
        raise UserError(f"{store.path(name)}: has {store.sizes[name]:,} bytes, at most {MAX_JSON:,}", AGAIN)
    content = store.read(name)
    check_kind(store.path(name), content)
    return json_object(content, store.path(name))
