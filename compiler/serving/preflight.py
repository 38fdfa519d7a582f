"""What can be refused before anything is built or started."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from glob import glob
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.errors import ArtifactError
from compiler.serving.checkpoints import check_adapter, check_model
from compiler.serving.container import ADAPTER, MODEL, Container

if TYPE_CHECKING:
    from compiler.serving.artifacts import ServedArtifact
    from compiler.serving.engine import Engine, Found
    from compiler.serving.weights import Weights

KEY, TOKEN = "VLLM_API_KEY", "HF_TOKEN"

DEVICES = ("/dev/vfio/[0-9]*", "/dev/accel*")
"""Where a machine's TPU chips show."""


def check_options(container: Container, model: Path | None, adapter: Path | None) -> None:
    """Refuses folders that the server would not read."""
    if model is not None and container.model.kind == "hub":
        raise ArtifactError(
            f"the recipe has vLLM load {container.model.address} from the Hugging Face hub, not a folder",
            "leave --model out, or build it with --set serve.model=DIR",
        )
    if adapter is not None and container.adapter is None:
        raise ArtifactError(
            "the recipe serves merged weights, without an adapter beside them",
            "leave --adapter out, or build it with --set serve.weights=adapter",
        )


def check_memory(memory: str | None) -> None:
    if memory is not None and not re.fullmatch(r"[1-9][0-9]*[bkmgBKMG]?[bB]?", memory):
        raise ArtifactError(f"--memory {memory} is not a size", "write it in bytes, or as 512m or 64g")


def check_key(container: Container, environ: Mapping[str, str]) -> None:
    if container.api_key and not environ.get(KEY):
        raise ArtifactError(
            f"serve.host is {container.host}, which others can reach: the server wants an API key, and {KEY} "
            "is not set",
            f'make one with: export {KEY}="$(openssl rand -hex 32)"; or serve.host: 127.0.0.1',
        )


def check_files(artifact: ServedArtifact, folders: Mapping[str, Path]) -> None:
    """Checks the Dockerfile, the weights and the adapter.

    Args:
        folders: of this machine, by the place in the container.
    """
    if not (artifact.folder / "serve/Dockerfile").is_file():
        raise ArtifactError(
            f"{artifact.folder / 'serve/Dockerfile'} is missing", "build it again: recipe build RECIPE"
        )
    container, serve = artifact.container, artifact.recipe.serve
    assert serve is not None
    _check_part(
        container.model,
        folders.get(MODEL),
        "--model",
        "the weights lie",
        check_model,
        serve.weights == "merged",
    )
    if container.adapter is not None:
        _check_part(
            container.adapter, folders.get(ADAPTER), "--adapter", "the adapter lies", check_adapter, True
        )


def _check_part(
    weights: Weights,
    folder: Path | None,
    option: str,
    lies: str,
    check: Callable[[Path, str], None],
    merged: bool,
) -> None:
    """Checks the weights or the adapter.

    Args:
        folder: that is to be mounted.
        option: that names another folder.
        lies: "the weights lie".
        merged: whether merge.py writes it.
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


def check_name(artifact: ServedArtifact, engine: Engine) -> Found | None:
    """The container that an earlier start left, to be removed; None where there is none.

    Raises:
        ArtifactError: a container of this name runs, or is not ours.
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
    """Checks that the server can listen, by listening in its place."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            container.host, container.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ArtifactError(
            f"serve.host {container.host} is no address: {error.strerror}", "write an IP address: 127.0.0.1"
        ) from error
    with socket.socket(family, kind) as probe:
        # What a server that has ended leaves behind for a minute is no obstacle to vLLM either.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen()
        except PermissionError:
            return  # a low port, which the container's root may take
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ArtifactError(
                    f"serve.host {container.host} is no address of this machine",
                    "serve.host: 127.0.0.1, or 0.0.0.0 for all of its addresses",
                ) from error
            if error.errno != errno.EADDRINUSE:
                raise
            raise _taken(container, engine) from error


def _taken(container: Container, engine: Engine) -> ArtifactError:
    other = "stop what listens there, or build the recipe with another port: --set serve.port=8001"
    for found, port in engine.running():
        if port == container.port and found.artifact is not None:
            return ArtifactError(
                f"port {container.port} is taken by the container {found.name}",
                f"stop it with: recipe serve down {found.artifact}; or build the recipe with another port",
            )
        if found.project == container.name:
            return ArtifactError(
                f"port {container.port} is taken, it seems by {found.name}, which docker compose started",
                "stop it with: docker compose down, in the artifact's serve folder",
            )
    return ArtifactError(f"port {container.port} of {container.host} is taken", other)


def warnings(artifact: ServedArtifact, environ: Mapping[str, str]) -> Iterator[str]:
    """What may stop the server, or may not."""
    if artifact.accelerator.platform == "tpu" and not any(glob(pattern) for pattern in DEVICES):
        # No refusal: a CPU stand-in for vLLM-TPU runs without one.
        yield (
            f"the recipe serves on {artifact.accelerator.name}, and this machine shows no TPU "
            "(no /dev/vfio or /dev/accel*)"
        )
    if TOKEN in artifact.container.secrets and not environ.get(TOKEN):
        yield (
            f"{TOKEN} is not set, which the Hugging Face hub may ask for before it gives out "
            f"{artifact.container.model.address}"
        )
