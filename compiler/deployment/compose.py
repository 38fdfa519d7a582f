"""`recipe serve up` and `down`: docker compose on an artifact's serve/, after checks of what it mounts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler import terminal
from recipec.compiler.deployment import preflight
from recipec.compiler.deployment.docker_engine import (
    LOG_LINES,
    PullProgress,
    connected,
    layer_sizes,
    why_it_ended,
)
from recipec.compiler.errors import ArtifactError
from recipec.compiler.vllm.image_name import ImageName
from recipec.compiler.wording import as_typed
from recipec.runtime.clients.hosts import is_loopback
from recipec.runtime.progress import Progress, duration, readable_size

if TYPE_CHECKING:
    from recipec.compiler.deployment.docker_engine import ContainerState, Engine
    from recipec.compiler.deployment.served_artifact import ServedArtifact

Say = Callable[[str], None]

ONCE = '{"services": {"vllm": {"restart": "no"}}}'
"""Added to compose.yaml: a server that dies while it loads must not be started again and again."""

LAST_LINES = 15
"""How many last lines of its log are shown of a server that did not become ready."""

POLL_SECONDS = 1.0
"""How often a server that loads is looked at."""

LABEL = 100
"""Letters of a log line that are shown while a server loads."""


def up(
    artifact: ServedArtifact,
    say: Say,
    model: Path | None = None,
    adapter: Path | None = None,
    detach: bool = False,
    minutes: float | None = None,
) -> None:
    """Build and start an artifact's server, and remove its container when it or this process ends.

    Args:
        model, adapter: folders on this machine to use instead of the recipe's.
        detach: whether to return once the server is healthy, and to leave it running.
        minutes: how long a detached server may take; None for the default.

    Raises:
        ArtifactError: when a check refused it, it did not start, or it ended by itself.
    """
    container = artifact.container
    preflight.check_options(container, model, adapter)
    mounted = preflight.folders(container, artifact.folder, model, adapter)
    preflight.check_files(artifact, mounted)
    preflight.check_port(artifact)
    _check_compose()
    with connected("recipe serve up") as engine:
        terminal.log.info("Docker Engine %s at %s", engine.version, engine.host)
        warnings = [
            *artifact.notes,
            *preflight.warnings(artifact),
            *preflight.engine_warnings(artifact, engine, mounted),
        ]
        for warning in warnings:
            say(f"note: {warning}")
        for image in _images(artifact):
            if not engine.has(image):
                _pull(engine, image, say)
        named = {v.variable: str(mounted[v.target]) for v in container.volumes if v.target in mounted}
        keeps_running = False
        try:
            _start(artifact, detach, named, engine)
            if detach:
                _wait(artifact, engine, 60 * (minutes or container.startup_minutes))
                engine.restart_unless_stopped(_server(artifact))
            keeps_running = detach
        finally:
            if not keeps_running:
                _compose("--project-name", artifact.name, "down", "--timeout", "5")
    if detach:
        say(f"{artifact.name} is ready: {container.health_url.removesuffix('/health')}/v1")
        say(
            f"stop it with: recipe serve down {as_typed(artifact.folder)}; its log: docker logs --follow "
            f"{_server(artifact)}"
        )


def _server(artifact: ServedArtifact) -> str:
    """Return the name that docker compose gives the server's container."""
    return f"{artifact.name}-vllm-1"


def _images(artifact: ServedArtifact) -> list[ImageName]:
    """Return the images that the server needs, without a base that somebody changed in the Dockerfile."""
    base = artifact.container.base_image
    dockerfile = (artifact.folder / "serve/Dockerfile").read_text("utf-8", "replace").splitlines()
    names = [base] if f"ARG BASE_IMAGE={base}" in dockerfile else []
    names += [fetch.image for fetch in artifact.container.fetches]
    return [ImageName.read(name) for name in dict.fromkeys(names)]


def _pull(engine: Engine, image: ImageName, say: Say) -> None:
    """Pull an image that the engine does not have, and show how far it is.

    Raises:
        ArtifactError: the image does not exist, or does not fit the disk.
    """
    # Like the engine, take any certificate of a registry on this machine.
    unverified = ("--insecure",) if is_loopback(image.registry.rpartition(":")[0] or image.registry) else ()
    manifest = subprocess.run(
        ["docker", "manifest", "inspect", "--verbose", *unverified, image.exact],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    ).stdout
    pulled = PullProgress(layer_sizes(manifest))
    size = sum(pulled.sizes.values())
    if size:
        preflight.check_room(engine, image, size)
    compressed = f"{readable_size(size, ' ')}, compressed" if size else "of unknown size"
    say(f"pulling {image}: {compressed}")
    with Progress("pulling", pulled.total, unit="B") as progress:
        for message in engine.pull(image):
            progress.advance(pulled.advanced(message))


def _start(artifact: ServedArtifact, detach: bool, folders: Mapping[str, str], engine: Engine) -> None:
    """Build the image and start the containers. Attached, show their log until the server ends.

    Args:
        folders: the variables that compose.yaml takes folders from.

    Raises:
        ArtifactError: docker compose failed, or the server ended with an error.
    """
    words = ["--file", str(artifact.folder / "serve/compose.yaml"), "--file", "-", "up", "--build"]
    if detach:
        words.append("--detach")
    elif not artifact.container.fetches:
        # With this flag, compose would also end when a container has fetched the weights.
        words += ["--exit-code-from", "vllm"]
    status = _compose(*words, stdin=ONCE, environ=folders)
    state = engine.state(_server(artifact))
    ended_badly = state is not None and not state.running and (state.exit_status or state.error)
    if state is not None and ended_badly and (status or not detach):
        raise _ended(artifact, state, engine)
    if status:
        raise ArtifactError(
            f"docker compose ended with exit status {status}", "the reason is in its output, above"
        )


def _wait(artifact: ServedArtifact, engine: Engine, seconds: float) -> None:
    """Wait until the server's health check passes, and show the last line of its log meanwhile.

    Raises:
        ArtifactError: the server ended, or the time is over.
    """
    server = _server(artifact)
    deadline = time.monotonic() + seconds
    with Progress("", None, unit=f"of at most {seconds:,.0f} s") as progress:
        while True:
            state = engine.state(server)
            if state is not None and state.healthy:
                return
            if state is None or not state.running:
                break
            if time.monotonic() >= deadline:
                break
            last = [line.strip() for line in engine.log(server, 1)]
            progress.label = f"{artifact.name} loads{''.join(f' ({line[:LABEL]})' for line in last)}"
            progress.advance(time.monotonic() - progress.started - progress.done)
            time.sleep(POLL_SECONDS)
    for line in engine.log(server, LAST_LINES):
        terminal.say(line)
    if state is None:
        raise ArtifactError(
            f"the container {server} is gone", "somebody removed it; start it again: recipe serve up"
        )
    if not state.running:
        raise _ended(artifact, state, engine)
    probe = f", and its health check says: {state.probe}" if state.probe else ""
    raise ArtifactError(
        f"{artifact.name} did not become ready within {duration(seconds)}{probe}",
        "its log is above; if it still loads or compiles, give more time with --wait MINUTES",
    )


def _ended(artifact: ServedArtifact, state: ContainerState, engine: Engine) -> ArtifactError:
    why = why_it_ended(state, engine.log(_server(artifact), LOG_LINES))
    return ArtifactError(f"{artifact.name} did not stay up: {why}", "its output is above")


def _check_compose() -> None:
    """Check that docker and its plug-in are installed.

    Raises:
        ArtifactError: when they are not.
    """
    if _docker("compose", "version", quiet=True):
        raise ArtifactError(
            "docker has no command compose",
            "install its plug-in: docker-compose-plugin of Docker's packages, docker-compose-v2 of Ubuntu's",
        )


def down(artifact: ServedArtifact, volumes: bool) -> None:
    """Stop an artifact's server and remove its container. Requests in flight may finish.

    Args:
        volumes: whether to remove compiled programs and downloads as well.

    Raises:
        ArtifactError: when docker compose fails.
    """
    status = _compose("--project-name", artifact.name, "down", *(["--volumes"] if volumes else []))
    if status:
        raise ArtifactError(
            f"docker compose down ended with exit status {status}", "the reason is in its output, above"
        )


def _compose(*words: str, stdin: str = "", environ: Mapping[str, str] | None = None) -> int:
    return _docker("compose", *words, stdin=stdin, environ=environ)


def _docker(
    *words: str, stdin: str = "", environ: Mapping[str, str] | None = None, quiet: bool = False
) -> int:
    """Run docker and return its exit status. At Ctrl-C it stops the server in order; a second one kills it.

    Args:
        environ: environment variables to add.
        quiet: whether to discard its output.

    Raises:
        ArtifactError: when docker is not installed.
    """
    if shutil.which("docker") is None:
        raise ArtifactError(
            "docker is not installed", "install Docker Engine, with its plug-in for docker compose"
        )
    # In a session of its own, a terminal's Ctrl-C reaches it only through this process, and once.
    process = subprocess.Popen(
        ["docker", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL if quiet else None,
        stderr=subprocess.DEVNULL if quiet else None,
        env={**os.environ, **(environ or {})},
        start_new_session=True,
        text=True,
    )
    try:
        process.communicate(stdin)
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait()
        except BaseException:
            process.kill()
            raise
        raise
    return process.returncode
