"""`recipe serve down`: stop and remove what `recipe serve up` started."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.serving.engine import Engine, Running, volume_name
from recipec.compiler.serving.events import Interrupted, Signals
from recipec.compiler.serving.logs import Hider
from recipec.compiler.wording import as_typed
from recipec.runtime.progress import duration

if TYPE_CHECKING:
    from recipec.compiler.serving.artifacts import ServedArtifact

Say = Callable[[str], None]


def down(artifact: ServedArtifact, volumes: bool, say: Say, environ: Mapping[str, str] = os.environ) -> None:
    """Stop an artifact's server and remove its container. Requests in flight may finish.

    Args:
        volumes: whether to remove compiled programs and downloads as well.

    Raises:
        ArtifactError: when the engine does not answer, or refuses.
        Interrupted: when a signal came; the server was killed and removed.
    """
    with Signals() as signals:
        engine = signals.result(lambda: Engine.connect(Hider(()), environ))
        found = signals.result(lambda: engine.find(artifact.name))
        if found is None:
            say(f"{artifact.name} does not run{_composed(artifact, engine)}")
        elif found.artifact is None:
            raise ArtifactError(
                f"the container {found.name} was not started by `recipe serve up`",
                f"docker rm --force {found.name} removes it",
            )
        else:
            running = engine.adopt(found)
            if found.status != "exited":
                _stop(artifact, running, signals, say)
            running.remove()
            say(f"{found.name} is down")
        if volumes:
            _remove_volumes(artifact, engine, say)


def _stop(artifact: ServedArtifact, running: Running, signals: Signals, say: Say) -> None:
    seconds = artifact.container.stop_grace_seconds
    finish = "requests in flight may finish; Ctrl-C kills it"
    say(f"stopping {running.name}, within {duration(seconds)}: {finish}")
    try:
        signals.result(lambda: running.stop(seconds))
    except Interrupted:
        say(f"killing {running.name}")
        running.remove()
        raise


def _composed(artifact: ServedArtifact, engine: Engine) -> str:
    """Return how to stop containers that docker compose started, as words to append to a message."""
    if any(found.project == artifact.name for found, _ in engine.running()):
        folder = as_typed(artifact.folder / "serve")
        return f" by `recipe serve up`, and docker compose started one: docker compose down in {folder}"
    return ""


def _remove_volumes(artifact: ServedArtifact, engine: Engine, say: Say) -> None:
    for volume in artifact.container.volumes:
        name = volume_name(artifact.container, volume.source)
        if volume.kind == "volume" and engine.remove_volume(name):
            say(f"removed the volume {name}")
