"""Checks before anything is built or started.

They check that a folder holds what vLLM will load, by names, sizes and the headers of safetensors files.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.vllm.container import ADAPTER, MODEL, Container
from recipec.compiler.vllm.flags import version
from recipec.compiler.wording import as_typed
from recipec.runtime.data.stops import GENERATION
from recipec.runtime.peft.peft_names import refused_parts
from recipec.runtime.progress import readable_size

if TYPE_CHECKING:
    from recipec.compiler.deployment.docker_engine import Engine
    from recipec.compiler.deployment.served_artifact import ServedArtifact
    from recipec.compiler.vllm.image_name import ImageName


TOKEN = "HF_TOKEN"

DEVICES = ("/dev/vfio/[0-9]*", "/dev/accel*")
"""Paths under which a machine's TPU chips appear."""


def check_options(container: Container, model: Path | None, adapter: Path | None) -> None:
    """Refuse folders that the server would not read."""
    if adapter is not None and container.adapter is None:
        raise ArtifactError(
            "the recipe serves merged weights, without an adapter",
            "leave --adapter out, or build it with --set serve.weights=adapter",
        )
    for option, folder, weights in (
        ("--model", model, container.model),
        ("--adapter", adapter, container.adapter),
    ):
        if folder is not None and weights is not None and weights.kind != "folder":
            raise ArtifactError(
                f"the recipe has vLLM load {weights.address}, not a folder",
                f"leave {option} out, or build the recipe with a folder",
            )


def check_files(artifact: ServedArtifact, folders: Mapping[str, Path]) -> None:
    """Check the Dockerfile, the weights and the adapter.

    Args:
        folders: folders on this machine, by their mount point in the container.
    """
    if not (artifact.folder / "serve/Dockerfile").is_file():
        raise ArtifactError(
            f"{artifact.folder / 'serve/Dockerfile'} is missing", "build it again: recipe build RECIPE"
        )
    container = artifact.container
    merges = artifact.recipe.server.weights == "merged"
    for weights, target, option, holds, check, script in (
        (container.model, MODEL, "--model", "the weights lie", _check_model, merges),
        (container.adapter, ADAPTER, "--adapter", "the adapter lies", _check_adapter, True),
    ):
        if weights is None or weights.kind != "folder":
            continue
        if target not in folders:
            raise ArtifactError(
                f"the recipe does not say where {holds} on this machine", f"name the folder: {option} DIR"
            )
        make = "python merge.py in the artifact's folder writes it; " if script else ""
        check(folders[target], f"{make}{option} DIR names another folder")


def folders(
    container: Container, artifact: Path, model: Path | None, adapter: Path | None
) -> dict[str, Path]:
    """Return folders on this machine by their mount point in the container, without checking that they exist.

    Args:
        artifact: its folder.
        model, adapter: folders that the user names. If None, use the variables MODEL_DIR and ADAPTER_DIR,
            as compose.yaml does, and otherwise the recipe's folders.
    """
    sources = {MODEL: model, ADAPTER: adapter}
    out = {}
    for volume in container.volumes:
        if volume.kind != "bind":
            continue
        variable = os.environ.get(volume.variable)
        named = sources[volume.target] or (Path(variable) if variable else None)
        if named is None and volume.source:
            named = artifact / Path(volume.source).expanduser()
        if named is not None:
            out[volume.target] = Path(os.path.abspath(named.expanduser()))
    return out


def check_port(artifact: ServedArtifact) -> None:
    """Check that the server can listen on its port, by listening on it."""
    host, port = artifact.container.host, artifact.container.port
    help = "serve.host: 127.0.0.1, or 0.0.0.0 for all of its addresses"
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # Sockets of an ended server that linger for a minute do not stop vLLM either.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except socket.gaierror as error:
        raise ArtifactError(f"serve.host {host} is not an address: {error.strerror}", help) from error
    except PermissionError:
        return  # a low port, which root in the container may use
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise ArtifactError(f"serve.host {host} is not an address of this machine", help) from error
        if error.errno != errno.EADDRINUSE:
            raise
        raise ArtifactError(
            f"port {port} of {host} is in use",
            f"if it is this artifact's server: recipe serve down {as_typed(artifact.folder)}; or build the "
            "recipe with another port: --set serve.port=8001",
        ) from error


def warnings(artifact: ServedArtifact) -> Iterator[str]:
    """Yield warnings about what may stop the server."""
    if artifact.accelerator.platform == "tpu" and not any(glob(pattern) for pattern in DEVICES):
        # Only a warning: a CPU stand-in for vLLM-TPU runs without a chip.
        yield (
            f"the recipe serves on {artifact.accelerator.name}, and this machine shows no TPU "
            "(no /dev/vfio or /dev/accel*)"
        )
    if TOKEN in artifact.container.secrets and not os.environ.get(TOKEN):
        yield (
            f"{TOKEN} is not set, which the Hugging Face hub may need for {artifact.container.model.address}"
        )


UNPACKED = 3
"""The disk that an image takes while it is pulled, in its compressed size: an estimate."""


def check_room(engine: Engine, image: ImageName, size: int) -> None:
    """Check that the engine's disk can hold an image that it has to pull.

    Args:
        size: bytes of its compressed layers.
    """
    if not engine.local or not os.path.isdir(engine.storage):
        return  # another machine's disk
    free = shutil.disk_usage(engine.storage).free
    if free < UNPACKED * size:
        raise ArtifactError(
            f"{engine.storage} has {readable_size(free, ' ')} free, too little for {image}: its layers have "
            f"{readable_size(size, ' ')}, and unpacked about {UNPACKED} times that",
            "free space there: `docker system df` shows what the engine holds, and `docker system prune` "
            "removes what nothing uses",
        )


def engine_warnings(artifact: ServedArtifact, engine: Engine, folders: Mapping[str, Path]) -> Iterator[str]:
    """Yield warnings about the engine's machine.

    Args:
        folders: folders on this machine, by their mount point in the container.
    """
    if not engine.local:
        yield (
            f"the engine is at {engine.host}: the port, the TPU, the disk and the folders of the weights "
            "were looked for on this machine, not there"
        )
        return
    weights = folders.get(MODEL)
    size = sum(file.stat().st_size for file in weights.glob("*.safetensors")) if weights else 0
    if 0 < engine.memory < size:
        memory = readable_size(engine.memory, " ")
        yield (
            f"the weights have {readable_size(size, ' ')}, and this machine has {memory} of memory, through "
            "which vLLM reads them"
        )


INDEX = "model.safetensors.index.json"

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
"""Files that vLLM reads weights from."""

TOKENIZERS = ("tokenizer*", "*.tiktoken", "tekken.json", "vocab.*", "spiece.model", "*.spm")

MAX_HEADER = 100_000_000
"""Bytes; the limit that the safetensors library sets."""

AGAIN = "copy or merge it again"


def _check_model(folder: Path, help: str) -> None:
    """Check that a folder holds a complete model.

    Args:
        help: what to do if it is missing.

    Raises:
        ArtifactError: at the first problem that would otherwise stop vLLM after minutes.
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
        raise ArtifactError(
            f"{folder} holds no tokenizer", "copy the base model's tokenizer files next to it"
        )
    _refuse_links(folder, [folder / "config.json", *shards])


def _check_adapter(folder: Path, help: str) -> None:
    """Check that a folder holds a complete PEFT adapter.

    Args:
        help: what to do if it is missing.

    Raises:
        ArtifactError: when it does not.
    """
    folder = as_typed(folder)
    _check_folder(folder, "the adapter is", help)
    if not (folder / "adapter_config.json").is_file():
        raise ArtifactError(f"{folder} holds no adapter: it has no adapter_config.json", help)
    config = _json(folder / "adapter_config.json")
    if refused := refused_parts(config):
        raise ArtifactError(
            f"vLLM {version()} refuses the adapter in {folder}: it has {refused[0]}",
            "merge it, and serve it with weights: merged",
        )
    if not (folder / GENERATION).is_file():
        raise ArtifactError(
            f"{folder} has no {GENERATION}, from which the server reads the tokens that end an answer",
            "merge.py writes it; next to another adapter, put a copy of its base's",
        )
    weights = [folder / f"adapter_model.{kind}" for kind in ("safetensors", "bin")]
    present = [path for path in weights if path.is_file()]
    if not present:
        raise ArtifactError(f"{folder} holds no adapter: it has no adapter_model.safetensors", help)
    _check_safetensors(present[0])
    _refuse_links(folder, [folder / "adapter_config.json", folder / GENERATION, present[0]])


def _check_folder(folder: Path, what: str, help: str) -> None:
    if not folder.exists():
        raise ArtifactError(f"{what} not there: no folder {folder}", help)
    if not folder.is_dir():
        raise ArtifactError(f"{folder} is not a folder", help)


def _indexed(folder: Path) -> list[Path]:
    """Return the shards that an index names, after checking that all of them exist."""
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
    """Return a safetensors file's header, after checking the file's size; {} for another kind of file."""
    if path.suffix != ".safetensors":
        return {}
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size, MAX_HEADER):
            raise ArtifactError(f"{path} is not a safetensors file, or is truncated within its header", AGAIN)
        header = file.read(length)
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((int(tensor["data_offsets"][1]) for tensor in tensors.values()), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ArtifactError(f"{path} does not have the header of a safetensors file", AGAIN) from None
    if size != end:
        what = "is truncated" if size < end else "is longer than its header says"
        raise ArtifactError(f"{path} {what}: {size:,} of {end:,} bytes", AGAIN)
    return dict(tensors)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON ({error})", AGAIN) from error
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} is not a JSON object", AGAIN)
    return value


def _refuse_links(folder: Path, files: Iterable[Path]) -> None:
    """Refuse links that leave the folder, as in the hub's cache: the container sees only the folder."""
    inside = folder.resolve()
    for path in files:
        if not path.resolve().is_relative_to(inside):
            raise ArtifactError(
                f"{path} is a link to {path.resolve()}, which the container would not see",
                f"copy the files themselves, and name the copy: cp -rL {folder} COPY",
            )
