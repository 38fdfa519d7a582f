"""Whether a folder holds what vLLM is to load: looks at names, sizes and the headers of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compiler.errors import ArtifactError
from compiler.wording import as_typed

INDEX = "model.safetensors.index.json"

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files that vLLM reads weights from."""

TOKENIZERS = ("tokenizer*", "*.tiktoken", "tekken.json", "vocab.*", "spiece.model", "*.spm")

MAX_HEADER = 100_000_000
"""Bytes; the limit that the safetensors library sets."""

AGAIN = "copy or merge it again"


def check_model(folder: Path, help: str) -> None:
    """Checks that a folder holds a whole model.

    Args:
        help: what to do when it is not there.

    Raises:
        ArtifactError: at the first thing that vLLM would stumble over after minutes.
    """
    folder = as_typed(folder)
    _check_folder(folder, "the weights are", help)
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder} holds no model: it has no config.json", help)
    _json(folder / "config.json")
    if (folder / INDEX).is_file():
        shards = _indexed(folder)
    else:
        shards = sorted({path for pattern in WEIGHTS for path in folder.glob(pattern)})
        if not shards:
            raise ArtifactError(f"{folder} holds no weights: no .safetensors file", help)
    for path in shards:
        _check_safetensors(path)
    if not any(path for pattern in TOKENIZERS for path in folder.glob(pattern)):
        raise ArtifactError(f"{folder} holds no tokenizer", "copy the base model's tokenizer files beside it")
    _refuse_links(folder, [folder / "config.json", *shards])


def check_adapter(folder: Path, help: str) -> None:
    """Checks that a folder holds a whole PEFT adapter.

    Args:
        help: what to do when it is not there.

    Raises:
        ArtifactError: when it does not.
    """
    folder = as_typed(folder)
    _check_folder(folder, "the adapter is", help)
    if not (folder / "adapter_config.json").is_file():
        raise ArtifactError(f"{folder} holds no adapter: it has no adapter_config.json", help)
    _json(folder / "adapter_config.json")
    weights = [folder / f"adapter_model.{kind}" for kind in ("safetensors", "bin")]
    present = [path for path in weights if path.is_file()]
    if not present:
        raise ArtifactError(f"{folder} holds no adapter: it has no adapter_model.safetensors", help)
    _check_safetensors(present[0])
    _refuse_links(folder, [folder / "adapter_config.json", present[0]])


def _check_folder(folder: Path, what: str, help: str) -> None:
    if not folder.exists():
        raise ArtifactError(f"{what} not there: no folder {folder}", help)
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", help)


def _indexed(folder: Path) -> list[Path]:
    """The shards that an index names, all of them there."""
    index = _json(folder / INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ArtifactError(f"{folder / INDEX} is not the index of a model: it has no weight_map", AGAIN)
    shards = sorted(set(places.values()))
    missing = [name for name in shards if not (folder / name).is_file()]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ArtifactError(
            f"{folder} is incomplete: {missing[0]}{more} of {len(shards)} shards "
            f"{'are' if more else 'is'} missing",
            AGAIN,
        )
    for name in shards:
        lacking = {tensor for tensor, place in places.items() if place == name}
        lacking -= _check_safetensors(folder / name).keys()
        if lacking:
            raise ArtifactError(
                f"{folder / name} lacks the tensor {min(lacking)}, which {INDEX} says it holds", AGAIN
            )
    return [folder / name for name in shards]


def _check_safetensors(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, whose size is the one that it says; {} of another kind of file."""
    if path.suffix != ".safetensors":
        return {}
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size, MAX_HEADER):
            raise ArtifactError(f"{path} is not a safetensors file, or is cut off within its header", AGAIN)
        header = file.read(length)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ArtifactError(f"{path} has not the header of a safetensors file", AGAIN) from None
    if size != end:
        what = "is cut off" if size < end else "is longer than its header says"
        raise ArtifactError(f"{path} {what}: {size:,} of {end:,} bytes", AGAIN)
    return dict(tensors)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({error})", AGAIN) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} holds no JSON object", AGAIN)
    return value


def _refuse_links(folder: Path, files: Iterable[Path]) -> None:
    """A container sees the folder alone: links out of it, as the hub's cache has them, lead nowhere there."""
    inside = folder.resolve()
    for path in files:
        if not path.resolve().is_relative_to(inside):
            raise ArtifactError(
                f"{path} is a link to {path.resolve()}, which the container would not see",
                f"copy the files themselves, and name the copy: cp -rL {folder} COPY",
            )
