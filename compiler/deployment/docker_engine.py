"""A Docker engine, through Docker's SDK (the extra `serve`): registries, images, and how a container is.

`docker compose` starts and ends containers (compose.py). The SDK reads what its command line shows badly.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import install, missing_packages

if TYPE_CHECKING:
    from docker import DockerClient

    from recipec.compiler.vllm.image_name import ImageName

DEFAULT_HOST = "unix:///var/run/docker.sock"

LOG_LINES = 200
"""How many last lines of a server's log are searched for the reason of its end."""

EXCEPTION = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b: .+")
"""The line of a Python exception in a log."""

NO_REASON = "Engine core initialization failed"
"""Part of vLLM's last exception, which only says that another one came before."""


@dataclass(frozen=True)
class PublishedImage:
    """An image in a registry.

    Attributes:
        digest: "sha256:...". For an image of several platforms it is the index's, which holds for all.
        platforms: "linux/amd64" and so on; empty if the registry does not say.
    """

    digest: str
    platforms: tuple[str, ...]


@dataclass(frozen=True)
class ContainerState:
    """How a container is.

    Attributes:
        running: whether its process runs.
        healthy: whether its last health checks passed.
        exit_status: of its process, once it ended.
        out_of_memory: whether the system killed it because memory ran out.
        error: why the engine could not start it, "" if it could.
        probe: what its last health check printed, "" for nothing.
    """

    running: bool
    healthy: bool
    exit_status: int
    out_of_memory: bool
    error: str
    probe: str


class Engine:
    """A running engine.

    Attributes:
        host: its address, as in DOCKER_HOST.
        local: whether it runs on this machine, so that its disk and ports are this machine's.
        version: "28.2.2".
        memory: bytes of its machine.
        storage: the folder that holds its images.
    """

    def __init__(self, client: DockerClient, host: str) -> None:
        self._client = client
        self.host = host
        self.local = host.startswith("unix://")
        info = client.info()
        self.version = str(info.get("ServerVersion", ""))
        self.memory = int(info.get("MemTotal", 0))
        self.storage = str(info.get("DockerRootDir", ""))

    def published(self, image: ImageName) -> PublishedImage:
        """Ask the registry for an image. The engine sends the password that `docker login` stored.

        Raises:
            ArtifactError: the registry does not have it, or the engine does not reach the registry.
        """
        from docker.errors import APIError

        with self._sentences(f"the registry was not asked for {image}"):
            try:
                data = self._client.images.get_registry_data(str(image))
            except APIError as error:
                raise _not_published(image, error) from error
        platforms = (
            "/".join(part for part in map(platform.get, ("os", "architecture", "variant")) if part)
            for platform in data.attrs.get("Platforms") or ()
        )
        return PublishedImage(data.id, tuple(dict.fromkeys(platforms)))

    def has(self, image: ImageName) -> bool:
        """Return whether the engine has an image."""
        from docker.errors import ImageNotFound

        with self._sentences(f"the engine was not asked for {image}"):
            try:
                self._client.images.get(str(image))
            except ImageNotFound:
                return False
        return True

    def pull(self, image: ImageName) -> Iterator[Mapping[str, Any]]:
        """Pull an image, and yield the engine's progress messages.

        Raises:
            ArtifactError: the image cannot be pulled.
        """
        from docker.errors import APIError

        name, reference = (
            (image.repository, image.digest) if image.digest else (image.repository, image.tag or "latest")
        )
        with self._sentences(f"{image} was not pulled"):
            try:
                for message in self._client.api.pull(name, tag=reference, stream=True, decode=True):
                    if "error" in message:
                        raise ArtifactError(
                            f"{image} was not pulled: {_one_line(message['error'])}",
                            "free space if the engine's disk is full; otherwise start again, which continues "
                            "after the last complete layer",
                        )
                    yield message
            except APIError as error:
                raise _not_published(image, error) from error

    def state(self, container: str) -> ContainerState | None:
        """Return how a container is; None if there is none of this name."""
        from docker.errors import NotFound

        with self._sentences(f"the engine was not asked for the container {container}"):
            try:
                state = self._client.containers.get(container).attrs["State"]
            except NotFound:
                return None
        health = state.get("Health") or {}
        probes = health.get("Log") or [{}]
        return ContainerState(
            running=bool(state.get("Running")),
            healthy=health.get("Status") == "healthy",
            exit_status=int(state.get("ExitCode", 0)),
            out_of_memory=bool(state.get("OOMKilled")),
            error=_one_line(state.get("Error", "")),
            probe=_last_line(probes[-1].get("Output", "")),
        )

    def log(self, container: str, lines: int) -> list[str]:
        """Return the last lines of a container's log; none if the container is gone."""
        from docker.errors import NotFound

        with self._sentences(f"the log of {container} was not read"):
            try:
                written: bytes = self._client.containers.get(container).logs(tail=lines)
            except NotFound:
                return []
        return written.decode("utf-8", "replace").splitlines()

    def restart_unless_stopped(self, container: str) -> None:
        """Let the engine start a container again when it ends by itself, and with the machine."""
        with self._sentences(f"{container} will not be started again when it ends"):
            self._client.containers.get(container).update(restart_policy={"Name": "unless-stopped"})

    @contextmanager
    def _sentences(self, failed: str) -> Iterator[None]:
        """Turn the errors of the SDK and of its connection into one sentence."""
        from docker.errors import DockerException
        from requests import RequestException

        try:
            yield
        except (DockerException, RequestException) as error:
            help = f"check the engine at {self.host}: docker info"
            raise ArtifactError(f"{failed}: {_reason(error)}", help) from error


@contextmanager
def connected(command: str, without: str = "") -> Iterator[Engine]:
    """Connect to the engine that `docker` uses: DOCKER_HOST, or the current context.

    Args:
        command: what needs it: "recipe serve pin".
        without: what helps if there is no engine; "" if nothing else does.

    Raises:
        ArtifactError: the SDK is not installed, or no engine answers.
    """
    if missing_packages(["docker"]):
        raise ArtifactError(f"{command} needs Docker's SDK, which is not installed", install("serve"))
    import docker
    from docker.context import ContextAPI
    from docker.errors import DockerException
    from requests import RequestException

    host = os.environ.get("DOCKER_HOST") or DEFAULT_HOST
    try:
        host = os.environ.get("DOCKER_HOST") or ContextAPI.kwargs_from_context().get("base_url") or host
        client = docker.from_env()
        engine = Engine(client, host)
    except (DockerException, RequestException) as error:
        help = "start it (sudo systemctl start docker), or name another one in DOCKER_HOST"
        if isinstance(_system_error(error), PermissionError):
            help = "join the group that may use it (sudo usermod -aG docker $USER), and log in again"
        raise ArtifactError(
            f"{command} needs a Docker engine, and none answers at {host}: {_reason(error)}",
            f"{help}{without and '; or '}{without}",
        ) from error
    try:
        yield engine
    finally:
        client.close()


def why_it_ended(state: ContainerState, log: list[str]) -> str:
    """Return a clause that says why a container's process ended.

    Args:
        log: its last lines.
    """
    if state.error:
        return f"the engine did not start it: {state.error}"
    if state.out_of_memory:
        return "the system killed it because memory ran out"
    if state.exit_status == 137:
        return "it was killed (exit status 137): if nobody did, this machine's memory ran out"
    exceptions = [match[0] for line in log if (match := EXCEPTION.search(line)) and NO_REASON not in line]
    last = exceptions[-1:] or [line for line in log if line.strip()][-1:]
    return f"it ended with exit status {state.exit_status}{''.join(f': {line.strip()}' for line in last)}"


PLATFORM = ("linux", "amd64")
"""The platform of TPU machines."""


def layer_sizes(manifest: str) -> dict[str, int]:
    """Return the bytes of an image's layers, as the registry sends them, by the start of their digests.

    Args:
        manifest: what `docker manifest inspect --verbose` printed.
    """
    try:
        parsed = json.loads(manifest)
        entries = parsed if isinstance(parsed, list) else [parsed]
        for entry in entries:
            platform = entry["Descriptor"].get("platform") or {}
            if len(entries) > 1 and (platform.get("os"), platform.get("architecture")) != PLATFORM:
                continue
            layers = (entry.get("SchemaV2Manifest") or entry.get("OCIManifest"))["layers"]
            return {layer["digest"].removeprefix("sha256:")[:12]: int(layer["size"]) for layer in layers}
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    return {}


@dataclass
class PullProgress:
    """How much of an image is here, from the engine's messages: a layer is downloaded, then unpacked.

    Attributes:
        sizes: bytes of the layers, by the first 12 digits of their digests; empty if they are not known.
        done: bytes of each layer and phase.
    """

    sizes: Mapping[str, int]
    done: dict[tuple[str, str], int] = field(default_factory=dict)

    @property
    def total(self) -> int | None:
        """Bytes of both phases, None if they are not known."""
        return 2 * sum(self.sizes.values()) or None

    def advanced(self, message: Mapping[str, Any]) -> int:
        """Return the bytes that a message adds."""
        layer, status = str(message.get("id", "")), str(message.get("status", ""))
        before = sum(self.done.values())
        whole = self.sizes.get(layer, 0)
        if status in ("Pull complete", "Already exists"):
            phases = {"Downloading": whole, "Extracting": whole}
        elif status == "Download complete":
            phases = {"Downloading": whole}
        elif status in ("Downloading", "Extracting"):
            detail = message.get("progressDetail") or {}
            # Without a total, it counts seconds.
            phases = {status: int(detail.get("current", 0)) if detail.get("total") else 0}
        else:
            return 0
        for phase, size in phases.items():
            self.done[layer, phase] = max(self.done.get((layer, phase), 0), size)
        return sum(self.done.values()) - before


def _not_published(image: ImageName, error: Any) -> ArtifactError:
    """Return the error for an image that its registry did not give."""
    answer = _one_line(error.explanation or str(error))
    if error.status_code in (400, 401, 403, 404):
        return ArtifactError(
            f"{image.registry} has no image {image} for this user: {answer}",
            f"check the name and the tag; for a private registry: docker login {image.registry}",
        )
    return ArtifactError(
        f"the engine got no answer about {image} from {image.registry}: {answer}",
        "check the network of the engine's machine",
    )


def _reason(error: BaseException) -> str:
    """Return why the SDK failed: the system's words if the connection did, else its own."""
    system = _system_error(error)
    return system.strerror if system is not None and system.strerror else _one_line(str(error))


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error behind those of the SDK, requests and urllib3."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        error = error.__cause__ or error.__context__
    return None


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1].strip()
