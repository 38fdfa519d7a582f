"""The Docker engine. Only this module uses Docker's SDK; it turns the SDK's errors into ArtifactErrors.

`settings` translates a Container into the SDK's arguments, with the same result as compose.yaml.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from recipec.compiler.errors import ArtifactError
from recipec.compiler.packages import install
from recipec.compiler.serving.container import ADAPTER, MODEL, Container

if TYPE_CHECKING:
    from recipec.compiler.serving.logs import Hider


ARTIFACT_LABEL = "recipec.artifact"
"""The label of our containers and volumes; its value is the artifact's folder."""

PORT_LABEL = "recipec.port"

SOCKET = "/var/run/docker.sock"

RESTART = {"Name": "unless-stopped"}

SEE = "see whether it runs: docker info"

ANSWER_SECONDS = 60
"""How long the engine may take to answer a request that does not wait for anything."""

START_ENGINE = (
    "start it (sudo systemctl start docker), or set DOCKER_HOST to the address of one that runs here"
)


@dataclass(frozen=True)
class FoundContainer:
    """A container that exists in the engine.

    Attributes:
        status: "created", "running", "exited", ...
        artifact: folder of the artifact that `recipe serve up` started it for; None if something else did.
        project: name of its docker compose project; None if compose did not start it.
    """

    id: str
    name: str
    status: str
    artifact: str | None
    project: str | None


@dataclass(frozen=True)
class Exit:
    """How a container ended."""

    code: int
    out_of_memory: bool
    error: str


def address(environ: Mapping[str, str]) -> str:
    """Return the engine's address: the one in DOCKER_HOST, or the usual socket."""
    return environ.get("DOCKER_HOST") or f"unix://{SOCKET}"


class Engine:
    """A connection to the engine. Its methods raise ArtifactError. Each can run in its own thread.

    Attributes:
        api: the SDK's client; use it within `doing`.
    """

    def __init__(self, api: Any, hide: Hider) -> None:
        self.api = api
        self._hide = hide

    @classmethod
    def connect(cls, hide: Hider, environ: Mapping[str, str] | None = None) -> Engine:
        """Connect to the engine that DOCKER_HOST names, or to the one behind the usual socket.

        Raises:
            ArtifactError: when the SDK is not installed, or no engine on this machine answers.
        """
        try:
            import docker
        except ModuleNotFoundError as error:
            raise ArtifactError(
                f"the Docker SDK for Python is not installed (no module {error.name})",
                install("serve"),
            ) from error
        from docker.utils import kwargs_from_env

        given = dict(os.environ if environ is None else environ)
        host = address(given)
        _refuse_elsewhere(host)
        try:
            api = docker.APIClient(version="auto", timeout=ANSWER_SECONDS, **kwargs_from_env(given))
        except docker.errors.InvalidVersion as error:
            raise ArtifactError(
                f"the Docker engine at {host} is too old for the Docker SDK: {_line(error)}",
                "update the engine",
            ) from error
        except Exception as error:
            raise _unreachable(host, error) from error
        return cls(api, hide)

    def has_image(self, name: str) -> bool:
        return self._found(f"look for the image {name}", lambda: self.api.inspect_image(name))

    def pull(self, name: str) -> Iterator[str]:
        """Pull an image from its registry; yield progress, one line at a time."""
        with self.doing(f"fetch the image {name}"):
            # Without a tag the SDK would pull all tags.
            tag = None if "@" in name or ":" in name.rpartition("/")[2] else "latest"
            for event in self.api.pull(name, tag=tag, stream=True, decode=True):
                self._raise_reported(f"fetch the image {name}", event)
                # Each layer reports its progress in bytes several times a second; skip those events.
                if "status" in event and not event.get("progressDetail"):
                    layer = f"{event['id']}: " if event.get("id") else ""
                    yield f"{layer}{event['status']}"

    def build(self, folder: Path, tag: str, base_image: str | None) -> Iterator[str]:
        """Build the image of a folder's Dockerfile; yield its output, one line at a time."""
        with self.doing(f"build the image {tag}"):
            output = self.api.build(
                path=str(folder),
                tag=tag,
                buildargs={"BASE_IMAGE": base_image} if base_image else None,
                # An interrupted build leaves no container behind either.
                rm=True,
                forcerm=True,
                decode=True,
            )
            for event in output:
                self._raise_reported(f"build the image {tag}", event)
                yield from self._hide(event.get("stream", "")).splitlines()

    def find(self, name: str) -> FoundContainer | None:
        """Find the container with exactly this name."""
        from docker.errors import NotFound

        with self.doing(f"look for the container {name}"):
            try:
                found = self.api.inspect_container(name)
            except NotFound:
                return None
        if found["Name"].lstrip("/") != name:  # a name may be an id, too
            return None
        return _found(found["Id"], name, found["State"]["Status"], found["Config"].get("Labels"))

    def running(self) -> list[tuple[FoundContainer, int | None]]:
        """Return all running containers, each with the port in its label."""
        out = []
        with self.doing("list its containers"):
            for item in self.api.containers():
                name = (item.get("Names") or ["?"])[0].lstrip("/")
                labels = item.get("Labels") or {}
                port = labels.get(PORT_LABEL, "")
                found = _found(item["Id"], name, item.get("State", "running"), labels)
                out.append((found, int(port) if port.isdigit() else None))
        return out

    def create(self, settings: ContainerSettings) -> Running:
        """Create a container and its volumes, and attach to its output, without starting it."""
        with self.doing(f"create the container {settings.name}"):
            for volume, labels in settings.volumes.items():
                self.api.create_volume(volume, labels=labels)
            host = self.api.create_host_config(**settings.host)
            made = self.api.create_container(**settings.container, host_config=host)
        running = Running(self, made["Id"], settings.name)
        try:
            running.listen()
        except BaseException:
            running.remove()
            raise
        return running

    def adopt(self, found: FoundContainer) -> Running:
        """Return a `Running` for a container that already exists."""
        return Running(self, found.id, found.name)

    def remove_volume(self, name: str) -> bool:
        """Remove a volume; return False if it does not exist."""
        return self._found(f"remove the volume {name}", lambda: self.api.remove_volume(name))

    def _found(self, what: str, act: Callable[[], object]) -> bool:
        """Act on something in the engine; return False if it does not exist."""
        from docker.errors import NotFound

        with self.doing(what):
            try:
                act()
            except NotFound:
                return False
        return True

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Turn the SDK's exceptions into ArtifactErrors with readable sentences.

        Args:
            what: the request to the engine, for the message: "start the container NAME".
        """
        from docker.errors import APIError, DockerException
        from requests.exceptions import RequestException, Timeout
        from urllib3.exceptions import HTTPError

        try:
            yield
        except APIError as error:
            said = self._hide(_line(error.explanation or error))
            raise EngineRefusal(what, said, error.status_code) from error
        except (Timeout, TimeoutError) as error:
            raise Lost(f"the Docker engine did not answer in time when asked to {what}", SEE) from error
        except (RequestException, HTTPError, ConnectionError) as error:
            raise Lost(f"the Docker engine stopped when asked to {what}", SEE) from error
        except (DockerException, OSError, ValueError) as error:
            raise EngineRefusal(what, self._hide(_line(error))) from error

    def _raise_reported(self, what: str, event: Mapping[str, Any]) -> None:
        """Raise an error that the engine reports as a line of a stream."""
        if "error" in event:
            raise EngineRefusal(what, self._hide(_line(event["error"])))


class EngineRefusal(ArtifactError):
    """The engine refused a request.

    Attributes:
        said: the engine's own message.
        status: HTTP status; None for an error within a stream.
    """

    def __init__(self, what: str, said: str, status: int | None = None) -> None:
        super().__init__(f"the Docker engine could not {what}: {said}")
        self.said = said
        self.status = status


class Lost(ArtifactError):
    """The engine no longer answers."""


class Running:
    """A container that `up` created or `down` found."""

    def __init__(self, engine: Engine, id: str, name: str) -> None:
        self.id = id
        self.name = name
        self._engine = engine
        self._api = engine.api
        self._output: Any = None

    def listen(self) -> None:
        """Attach to the output. Call this before `start`, so that no output is lost."""
        with self._engine.doing(f"follow the log of {self.name}"):
            self._output = self._api.attach(self.id, stream=True, demux=True)

    def start(self) -> None:
        with self._engine.doing(f"start the container {self.name}"):
            self._api.start(self.id)

    def output(self) -> Iterator[tuple[bytes | None, bytes | None]]:
        """Yield pieces of stdout and stderr until the container ends."""
        with self._engine.doing(f"follow the log of {self.name}"):
            yield from self._output

    def wait(self) -> Exit:
        """Wait until the container ends."""
        from docker.errors import NotFound

        with self._engine.doing(f"wait for the container {self.name}"):
            try:
                code = self._api.wait(self.id)["StatusCode"]
                state = self._api.inspect_container(self.id)["State"]
            except NotFound:
                return Exit(0, False, "removed by another command")
        return Exit(code, bool(state.get("OOMKilled")), self._engine._hide(state.get("Error", "")))

    def keep(self) -> None:
        """Let the engine restart the container when it fails, and after a reboot of the machine."""
        with self._engine.doing(f"set the restart policy of {self.name}"):
            self._api.update_container(self.id, restart_policy=RESTART)

    def stop(self, seconds: int) -> None:
        """Send SIGTERM, and SIGKILL if the container has not ended after `seconds`."""
        self._unless_gone(f"stop the container {self.name}", lambda: self._api.stop(self.id, timeout=seconds))

    def remove(self) -> None:
        """Remove the container, running or not, together with its unnamed volumes."""
        self._unless_gone(
            f"remove the container {self.name}",
            lambda: self._api.remove_container(self.id, v=True, force=True),
        )

    def _unless_gone(self, what: str, act: Any) -> None:
        """Call `act` on a container that another process may have stopped or removed."""
        try:
            with self._engine.doing(what):
                act()
        except EngineRefusal as error:
            # 404: no such container; 409: it does not run, or is being removed already.
            if error.status not in (404, 409):
                raise


def _found(id: str, name: str, status: str, labels: Mapping[str, str] | None) -> FoundContainer:
    labels = labels or {}
    return FoundContainer(
        id, name, status, labels.get(ARTIFACT_LABEL), labels.get("com.docker.compose.project")
    )


def _refuse_elsewhere(host: str) -> None:
    """Refuse an engine on another machine: it cannot mount the weights from this machine's folders."""
    kind, _, rest = host.partition("://")
    try:
        name = urlsplit(host if rest else f"tcp://{host}").hostname or ""
    except ValueError:
        return  # not a valid address; the SDK reports that
    local = kind in ("unix", "http+unix") or name in ("localhost", "127.0.0.1", "::1", "")
    if kind in ("tcp", "http", "https", "ssh") and not local:
        raise ArtifactError(
            f"DOCKER_HOST is {host}, the engine of another machine, which does not have this machine's "
            "folders",
            "run the command on the machine that serves, with its own engine",
        )


def _unreachable(host: str, error: Exception) -> ArtifactError:
    cause, path = _cause(error), host.removeprefix("http+").removeprefix("unix://")
    if isinstance(cause, FileNotFoundError):
        return ArtifactError(f"no Docker engine runs here: there is no socket {path}", START_ENGINE)
    if isinstance(cause, PermissionError):
        return ArtifactError(
            f"this user may not talk to the Docker engine: no permission on its socket {path}",
            "join the group docker (sudo usermod -aG docker $USER) and log in again, or use sudo",
        )
    if isinstance(cause, ConnectionRefusedError):
        return ArtifactError(f"no Docker engine runs here: nothing listens at {host}", START_ENGINE)
    if cause is not None:
        reason = cause.strerror or type(cause).__name__
        return ArtifactError(f"no Docker engine answers at {host}: {reason}", START_ENGINE)
    if re.search(r"bind address|not implemented|Port could not be cast|Port out of range", str(error)):
        return ArtifactError(
            f"DOCKER_HOST is `{host}`, which is not the address of an engine",
            f"unset it, or write it as unix://{SOCKET}",
        )
    return ArtifactError(f"no Docker engine answers at {host}: {_line(error)}", START_ENGINE)


def _cause(error: BaseException) -> OSError | None:
    """Return the operating system's error inside an SDK exception, if there is one."""
    seen: set[int] = set()
    pending: list[object] = [error]
    while pending:
        item = pending.pop(0)
        if not isinstance(item, BaseException) or id(item) in seen:
            continue
        seen.add(id(item))
        system = isinstance(item, OSError) and (item.errno is not None or isinstance(item, TimeoutError))
        if isinstance(item, OSError) and (system or isinstance(item, socket.gaierror)):
            return item
        pending += [*item.args, item.__cause__, item.__context__, getattr(item, "reason", None)]
    return None


def _line(error: object) -> str:
    """Return the text of an exception or an engine message as one line."""
    said = " ".join(str(error).split())
    return said if len(said) <= 500 else f"{said[:497]}..."


@dataclass(frozen=True)
class ContainerSettings:
    """The request to the engine for a container.

    Attributes:
        name: of the container.
        container, host: arguments of the SDK's create_container and create_host_config.
        volumes: labels of the named volumes, by volume name.
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
) -> ContainerSettings:
    """Return the settings that start a container as compose.yaml does.

    Args:
        artifact: its folder.
        folders: folders on this machine, by their mount point in the container.
        environ: environment from which to read secrets.
        memory: limit of the container's memory, "64g"; None for no limit.
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
        # The same limit for memory and for memory with swap: a server that swaps is too slow to use.
        host |= {"mem_limit": memory, "memswap_limit": memory}
    return ContainerSettings(
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
    """Return the secrets that are set in `environ`."""
    return {name: environ[name] for name in container.secrets if environ.get(name)}


def folders(
    container: Container,
    artifact: Path,
    model: Path | None,
    adapter: Path | None,
    environ: Mapping[str, str] = os.environ,
) -> dict[str, Path]:
    """Return folders on this machine by their mount point in the container, without checking that they exist.

    Args:
        artifact: its folder.
        model, adapter: folders that the user names. If None, use the variables MODEL_DIR and ADAPTER_DIR,
            as compose.yaml does, and otherwise the recipe's folders.
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
    """Return the name that docker compose gives a volume, so that both use the same compiled programs."""
    return f"{container.name}_{source}"


def _volume_labels(container: Container, source: str, artifact: Path) -> dict[str, str]:
    # Compose warns about a volume that lacks its own labels.
    return {
        "com.docker.compose.project": container.name,
        "com.docker.compose.volume": source,
        ARTIFACT_LABEL: str(artifact),
    }
