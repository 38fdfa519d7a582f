"""A Container as the arguments of the Docker SDK: what compose.yaml says, for `recipe serve up`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.serving.container import ADAPTER, MODEL, Container
from compiler.serving.engine import ARTIFACT_LABEL, PORT_LABEL


@dataclass(frozen=True)
class Settings:
    """What the engine is asked for.

    Attributes:
        name: of the container.
        container, host: arguments of the SDK's create_container and create_host_config.
        volumes: labels of the volumes that are kept, by name.
    """

    name: str
    container: Mapping[str, Any]
    host: Mapping[str, Any]
    volumes: Mapping[str, Mapping[str, str]]


def settings(
    container: Container,
    artifact: Path,
    folders: Mapping[str, Path],
    environ: Mapping[str, str],
    memory: str | None = None,
) -> Settings:
    """What starts a container as compose.yaml does.

    Args:
        artifact: its folder.
        folders: of this machine, by the place in the container that they are mounted at.
        environ: where secrets are taken from.
        memory: limit of its memory, "64g"; None for no limit.
    """
    mounts, volumes = [], {}
    for volume in container.volumes:
        mount: dict[str, Any] = {"Target": volume.target, "ReadOnly": volume.read_only}
        if volume.target in folders:
            mount |= {"Type": "bind", "Source": str(folders[volume.target])}
        else:
            name = volume_name(container, volume.source)
            mount |= {"Type": "volume", "Source": name}
            volumes[name] = _volume_labels(container, volume.source, artifact)
        mounts.append(mount)
    host: dict[str, Any] = {
        "mounts": mounts,
        "shm_size": container.shared_memory,
        "privileged": container.privileged,
        "network_mode": container.network_mode,
        "init": True,
    }
    if memory is not None:
        # The same limit for memory and swap together: a server that swaps is no use.
        host |= {"mem_limit": memory, "memswap_limit": memory}
    return Settings(
        name=container.name,
        container={
            "name": container.name,
            "image": container.name,
            "environment": passed_on(container, environ),
            "labels": {ARTIFACT_LABEL: str(artifact), PORT_LABEL: str(container.port)},
            "stop_timeout": container.stop_grace_seconds,
        },
        host=host,
        volumes=volumes,
    )


def passed_on(container: Container, environ: Mapping[str, str]) -> dict[str, str]:
    """The secrets that are set."""
    return {name: environ[name] for name in container.secrets if environ.get(name)}


def folders(
    container: Container,
    artifact: Path,
    model: Path | None,
    adapter: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Path]:
    """Folders of this machine by their places in the container, as they are named: none is looked at.

    Args:
        artifact: its folder.
        model, adapter: what the user names; None takes the variables MODEL_DIR and ADAPTER_DIR, as
            compose.yaml does, and then what the recipe says.
    """
    given = {MODEL: model, ADAPTER: adapter}
    out = {}
    for volume in container.volumes:
        named = given.get(volume.target)
        if named is not None:
            out[volume.target] = Path(os.path.abspath(named.expanduser()))
        elif volume.kind == "bind":
            variable = environ.get(volume.variable, "") if volume.variable else ""
            if variable:
                out[volume.target] = Path(os.path.abspath(Path(variable).expanduser()))
            elif volume.source:
                out[volume.target] = Path(os.path.abspath(artifact / Path(volume.source).expanduser()))
    return out


def volume_name(container: Container, source: str) -> str:
    """The name that docker compose gives a volume, so that both find the same compiled programs."""
    return f"{container.name}_{source}"


def _volume_labels(container: Container, source: str, artifact: Path) -> dict[str, str]:
    # Compose warns of a volume that is not labelled as its own.
    return {
        "com.docker.compose.project": container.name,
        "com.docker.compose.volume": source,
        ARTIFACT_LABEL: str(artifact),
    }
