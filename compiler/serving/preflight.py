"""Checks before anything is built or started.

They check that a folder holds what vLLM will load, by names, sizes and the headers of safetensors files.
"""

from __future__ import annotations

import errno
import json
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.serving.container import ADAPTER, MODEL, Container
from recipec.compiler.wording import as_typed

if TYPE_CHECKING:
    from recipec.compiler.serving.artifacts import ServedArtifact
    from recipec.compiler.serving.engine import Engine, FoundContainer
    from recipec.compiler.serving.weights import ServedWeights


KEY, TOKEN = "VLLM_API_KEY", "HF_TOKEN"

DEVICES = ("/dev/vfio/[0-9]*", "/dev/accel*")
"""Paths under which a machine's TPU chips appear."""


def check_options(container: Container, model: Path | None, adapter: Path | None) -> None:
    """Refuse folders that the server would not read."""
    if model is not None and container.model.kind == "hub":
        raise ArtifactError(
            f"the recipe has vLLM load {container.model.address} from the Hugging Face hub, not a folder",
            "leave --model out, or build it with --set serve.model=DIR",
        )
    if adapter is not None and container.adapter is None:
        raise ArtifactError(
            "the recipe serves merged weights, without an adapter",
            "leave --adapter out, or build it with --set serve.weights=adapter",
        )


def check_memory(memory: str | None) -> None:
    if memory is not None and not re.fullmatch(r"[1-9][0-9]*[bkmgBKMG]?[bB]?", memory):
        raise ArtifactError(f"--memory {memory} is not a size", "write it in bytes, or as 512m or 64g")


def check_key(container: Container, environ: Mapping[str, str]) -> None:
    if container.api_key and not environ.get(KEY):
        raise ArtifactError(
            f"serve.host is {container.host}, which others can reach: the server needs an API key, and {KEY} "
            "is not set",
            f'make one with: export {KEY}="$(openssl rand -hex 32)"; or serve.host: 127.0.0.1',
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
    container, serve = artifact.container, artifact.recipe.server
    _check_part(
        container.model,
        folders.get(MODEL),
        "--model",
        "the weights lie",
        _check_model,
        serve.weights == "merged",
    )
    if container.adapter is not None:
        _check_part(
            container.adapter, folders.get(ADAPTER), "--adapter", "the adapter lies", _check_adapter, True
        )


def _check_part(
    weights: ServedWeights,
    folder: Path | None,
    option: str,
    lies: str,
    check: Callable[[Path, str], None],
    merged: bool,
) -> None:
    """Check the weights or the adapter.

    Args:
        folder: the folder to be mounted.
        option: the option that selects another folder.
        lies: "the weights lie".
        merged: whether merge.py writes the folder.
    """
    if folder is not None:
        make = "python merge.py in the artifact's folder writes it; " if merged else ""
        check(folder, f"{make}{option} DIR names another folder")
    elif weights.kind == "bucket":
        raise ArtifactError(
            f"{lies} at {weights.address}, and `up` mounts a folder of this machine",
            f"copy them: gcloud storage rsync --recursive {weights.address} DIR; then {option} DIR",
        )
    elif weights.kind == "folder":
        raise ArtifactError(
            f"the recipe does not say where {lies} on this machine", f"name the folder: {option} DIR"
        )


def check_name(artifact: ServedArtifact, engine: Engine) -> FoundContainer | None:
    """Return the container that an earlier start left behind, to be removed; None if there is none.

    Raises:
        ArtifactError: when a container of this name runs, or was not created by recipec.
    """
    found = engine.find(artifact.name)
    if found is None:
        return None
    if found.artifact is None:
        raise ArtifactError(
            f"there is a container named {found.name} that `recipe serve up` did not start",
            f"docker rm --force {found.name} removes it",
        )
    if found.status in ("running", "paused", "restarting"):
        raise ArtifactError(
            f"{found.name} is up already: its container is {found.status}",
            f"stop it with: recipe serve down {found.artifact}; its log: docker logs --follow {found.name}",
        )
    return found


def check_port(container: Container, engine: Engine) -> None:
    """Check that the server can listen on its port, by listening on it."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            container.host, container.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ArtifactError(
            f"serve.host {container.host} is not an address: {error.strerror}",
            "write an IP address: 127.0.0.1",
        ) from error
    with socket.socket(family, kind) as probe:
        # Sockets of an ended server that linger for a minute do not stop vLLM either.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except PermissionError:
            return  # a low port, which root in the container may use
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ArtifactError(
                    f"serve.host {container.host} is not an address of this machine",
                    "serve.host: 127.0.0.1, or 0.0.0.0 for all of its addresses",
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise
            raise _taken(container, engine) from error


def _taken(container: Container, engine: Engine) -> ArtifactError:
    other = (
        "stop the program that listens there, or build the recipe with another port: --set serve.port=8001"
    )
    for found, port in engine.running():
        if port == container.port and found.artifact is not None:
            return ArtifactError(
                f"port {container.port} is in use by the container {found.name}",
                f"stop it with: recipe serve down {found.artifact}; or build the recipe with another port",
            )
        if found.project == container.name:
            return ArtifactError(
                f"port {container.port} is in use, probably by {found.name}, which docker compose started",
                "stop it with: docker compose down, in the artifact's serve folder",
            )
    return ArtifactError(f"port {container.port} of {container.host} is in use", other)


def warnings(artifact: ServedArtifact, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield warnings about what may stop the server."""
    if artifact.accelerator.platform == "tpu" and not any(glob(pattern) for pattern in DEVICES):
        # Only a warning: a CPU stand-in for vLLM-TPU runs without a chip.
        yield (
            f"the recipe serves on {artifact.accelerator.name}, and this machine shows no TPU "
            "(no /dev/vfio or /dev/accel*)"
        )
    if TOKEN in artifact.container.secrets and not environ.get(TOKEN):
        yield (
            f"{TOKEN} is not set, which the Hugging Face hub may need for {artifact.container.model.address}"
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
