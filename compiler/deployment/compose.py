"""`recipe serve up` and `down`: docker compose on an artifact's serve/, after checks of what it mounts."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.deployment import preflight
from recipec.compiler.errors import ArtifactError
from recipec.compiler.wording import as_typed

if TYPE_CHECKING:
    from recipec.compiler.deployment.served_artifact import ServedArtifact

Say = Callable[[str], None]

ONCE = '{"services": {"vllm": {"restart": "no"}}}'
"""Added to compose.yaml: a server that dies while it loads must not be started again and again."""

LAST_LINES = "15"
"""How many last lines of its log are shown of a server that did not become ready."""


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
    for note in [*artifact.notes, *preflight.warnings(artifact)]:
        say(f"note: {note}")
    named = {v.variable: str(mounted[v.target]) for v in container.volumes if v.target in mounted}
    start = ("--file", str(artifact.folder / "serve/compose.yaml"), "--file", "-", "up", "--build")
    project = ("--project-name", artifact.name)
    ready = False
    try:
        if not detach:
            # With this flag, compose would also end when a container has fetched the weights.
            until = () if container.fetches else ("--exit-code-from", "vllm")
            status = _compose(*start, *until, stdin=ONCE, environ=named)
            if status:
                raise ArtifactError(
                    f"docker compose ended with exit status {status}", "the reason is in its output, above"
                )
            return
        seconds = 60 * (minutes or container.startup_minutes)
        waiting = ("--detach", "--wait", "--wait-timeout", f"{seconds:.0f}")
        ready = _compose(*start, *waiting, stdin=ONCE, environ=named) == 0
        if not ready:
            _compose(*project, "logs", "--no-log-prefix", "--tail", LAST_LINES, "vllm")
            raise ArtifactError(
                f"{artifact.name} did not become ready",
                "the reason is above; if its log shows that it still loads or compiles, give more time with "
                "--wait MINUTES",
            )
    finally:
        if not ready:
            _compose(*project, "down", "--timeout", "5")
    server = f"{artifact.name}-vllm-1"
    _docker("update", "--restart", "unless-stopped", server)
    say(f"{artifact.name} is ready: {container.health_url.removesuffix('/health')}/v1")
    say(
        f"stop it with: recipe serve down {as_typed(artifact.folder)}; its log: docker logs --follow {server}"
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


def _docker(*words: str, stdin: str = "", environ: Mapping[str, str] | None = None) -> int:
    """Run docker and return its exit status. At Ctrl-C it stops the server in order; a second one kills it.

    Args:
        environ: environment variables to add.

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
