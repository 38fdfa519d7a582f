"""`recipe serve up`: build the image, start the server, wait until it answers, and clean up at the end."""

from __future__ import annotations

import os
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.serving import preflight
from recipec.compiler.serving.engine import (
    ContainerSettings,
    Engine,
    EngineRefusal,
    Exit,
    Running,
    folders,
    passed_on,
    settings,
)
from recipec.compiler.serving.events import Events, Interrupted, Put, Signals
from recipec.compiler.serving.logs import Hider, Lines
from recipec.compiler.wording import as_typed
from recipec.runtime.progress import duration
from recipec.runtime.serving.client import Client

if TYPE_CHECKING:
    from recipec.compiler.serving.artifacts import ServedArtifact

Say = Callable[[str], None]

LAST_LINES = 15
"""How many last lines of a log are shown again with the reason of a failure."""

ASK_SECONDS = 0.5
"""Pause between two checks whether the server answers."""

TELL_SECONDS = 30.0
"""Pause between two lines that say how long the server has been starting."""

UNREADY_GRACE_SECONDS = 5
"""Time from SIGTERM to SIGKILL for a server that is not ready; it has no requests in flight."""

STOPPED = (0, 143)
"""Exit statuses of a server that received SIGTERM."""

WIDTH = 110
"""Most characters of a line in the short display."""


@dataclass(frozen=True)
class Options:
    """The options of `up`.

    Attributes:
        model, adapter: folders on this machine to use instead of the recipe's.
        base_image: to use instead of the Dockerfile's.
        detach: whether `up` returns once the server is ready.
        minutes: how long the server may take to be ready; None for the default.
        memory: limit of the container's memory, "64g".
    """

    model: Path | None = None
    adapter: Path | None = None
    base_image: str | None = None
    detach: bool = False
    minutes: float | None = None
    memory: str | None = None


@dataclass(frozen=True)
class ContainerOutput:
    """Text that the container wrote to one of its streams."""

    error: bool
    text: str


@dataclass(frozen=True)
class Ready:
    """The server answers."""


def up(artifact: ServedArtifact, options: Options, say: Say, environ: Mapping[str, str] = os.environ) -> None:
    """Start an artifact's server and return when the server ends; with `detach`, when it is ready.

    Raises:
        ArtifactError: when a check refused it, it did not start, or it ended by itself.
        Interrupted: when a signal came; nothing is running any more.
    """
    with Signals() as signals:
        hide = Hider(passed_on(artifact.container, environ).values())
        mounted = _refuse_early(artifact, options, environ)
        engine = signals.result(lambda: Engine.connect(hide, environ))
        left = signals.result(lambda: preflight.check_name(artifact, engine))
        signals.result(lambda: preflight.check_port(artifact.container, engine))
        for note in [*artifact.notes, *preflight.warnings(artifact, environ)]:
            say(f"note: {note}")
        _provide_base(artifact, options, engine, signals, say)
        _build(artifact, options, engine, signals, say)
        if left is not None:
            engine.adopt(left).remove()
        asked = settings(artifact.container, artifact.folder, mounted, environ, options.memory)
        _run(artifact, options, asked, engine, signals, hide, say)


def _refuse_early(artifact: ServedArtifact, options: Options, environ: Mapping[str, str]) -> dict[str, Path]:
    """Run the checks that need no engine; return the folders to mount."""
    container = artifact.container
    preflight.check_options(container, options.model, options.adapter)
    preflight.check_memory(options.memory)
    preflight.check_key(container, environ)
    mounted = folders(container, artifact.folder, options.model, options.adapter, environ)
    preflight.check_files(artifact, mounted)
    return mounted


def _provide_base(
    artifact: ServedArtifact, options: Options, engine: Engine, signals: Signals, say: Say
) -> None:
    """Pull the base image of the server's image, unless it is already here."""
    base = (
        options.base_image or _base_of(artifact.folder / "serve/Dockerfile") or artifact.container.base_image
    )
    if signals.result(lambda: engine.has_image(base)):
        return
    say(f"fetching {base}, which is not here yet")
    try:
        for line in signals.each(lambda: engine.pull(base)):
            say(f"  {line}")
    except EngineRefusal as error:
        raise ArtifactError(
            f"the base image {base} is not on this machine and cannot be fetched: {error.said}",
            "check that its name is right and that its registry can be reached (docker login, if it is "
            "private); "
            "--base-image IMAGE names another",
        ) from error


def _base_of(dockerfile: Path) -> str | None:
    """Return the base image in a Dockerfile, which may have been edited since the artifact was built."""
    found = re.search(r"^ARG BASE_IMAGE=(\S+)", dockerfile.read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else None


def _build(artifact: ServedArtifact, options: Options, engine: Engine, signals: Signals, say: Say) -> None:
    """Build the image; show its steps, and all of its output if it fails."""
    started, lines = time.monotonic(), []
    say(f"building the image {artifact.name}")
    try:
        folder = artifact.folder / "serve"
        for line in signals.each(lambda: engine.build(folder, artifact.name, options.base_image)):
            lines.append(line)
            if re.match(r"Step \d+/\d+ :", line):
                say(f"  {_short(' '.join(line.split()))}")
    except EngineRefusal as error:
        for line in lines:
            say(f"  {line}")
        raise ArtifactError(
            f"the image {artifact.name} could not be built: {error.said}",
            f"the Dockerfile is {artifact.folder / 'serve/Dockerfile'}; its output is above",
        ) from error
    say(f"built in {duration(time.monotonic() - started)}")


def _run(
    artifact: ServedArtifact,
    options: Options,
    asked: ContainerSettings,
    engine: Engine,
    signals: Signals,
    hide: Hider,
    say: Say,
) -> None:
    """Create and start the container, and follow it. Remove it at the end unless it is to keep running."""
    signals.check()
    server = _Server(artifact, engine.create(asked), signals, hide, say)
    try:
        server.start(options)
        server.await_ready(options.minutes or artifact.container.startup_minutes)
        if options.detach:
            server.leave()
            return
        say("Ctrl-C stops it")
        server.follow()
    except BaseException:
        server.end()
        raise
    server.end()


def _short(line: str) -> str:
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."


class _Server:
    """The container that was created, and the events it reports."""

    def __init__(
        self, artifact: ServedArtifact, running: Running, signals: Signals, hide: Hider, say: Say
    ) -> None:
        self._artifact = artifact
        self._container = artifact.container
        self._running = running
        self._signals = signals
        self._hide = hide
        self._say = say
        self._memory: str | None = None
        self._events: Events[ContainerOutput | Exit | Ready] = Events(signals)
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._ready = False
        # Whether a thread follows the container and will report its end.
        self._followed = False

    def start(self, options: Options) -> None:
        self._memory = options.memory
        self._say(f"starting {self._running.name}")
        try:
            self._running.start()
        except EngineRefusal as error:
            if "executable file not found" in str(error):
                raise ArtifactError(
                    "the image has no program `vllm`",
                    "check that its base is an image of vLLM-TPU; --base-image IMAGE names another",
                ) from error
            raise
        self._followed = True
        self._events.start(self._report)

    def await_ready(self, minutes: float) -> None:
        """Wait until /health answers, and say from time to time how long it has taken.

        Raises:
            ArtifactError: when the server ended, or is not ready in time.
        """
        self._events.start(self._ask)
        started = told = time.monotonic()
        while not isinstance(event := self._next(1.0), Ready):
            now = time.monotonic()
            if isinstance(event, Exit):
                raise ArtifactError(*self._why(event))
            if now - started > minutes * 60:
                raise ArtifactError(
                    f"{self._running.name} is not ready after {minutes:g} min: {self._container.health_url} "
                    f"does not answer{self._last_lines()}",
                    "if its log shows that it still loads or compiles, give more time with --wait MINUTES",
                )
            if now - told >= TELL_SECONDS:
                told = now
                passed, left = duration(now - started), duration(minutes * 60 - (now - started))
                self._say(f"waiting for {self._container.health_url}, {passed} so far, at most {left} more")
        self._ready = True
        base = self._container.health_url.removesuffix("/health")
        self._say(f"{self._running.name} is ready after {duration(time.monotonic() - started)}: {base}/v1")
        self._say(
            "  the first requests may take longer, because some programs are compiled then; serve/smoke.sh "
            "shows "
            "the time to the first token (TTFT)"
        )

    def follow(self) -> None:
        """Show the log until the server ends.

        Raises:
            ArtifactError: when it ended by itself.
        """
        while not isinstance(event := self._next(None), Exit):
            pass
        if event.code not in STOPPED:
            raise ArtifactError(*self._why(event))
        self._say(f"{self._running.name} was stopped by another command")

    def leave(self) -> None:
        """Leave the server running on its own."""
        self._running.keep()
        self._say(
            f"stop it with: recipe serve down {as_typed(self._artifact.folder)}; "
            f"its log: docker logs --follow {self._running.name}"
        )

    def end(self) -> None:
        """Stop the container if it runs, and remove it. A signal meanwhile kills it at once."""
        try:
            if self._followed:
                self._stop()
        except Interrupted:
            self._say(f"killing {self._running.name}")
        except ArtifactError:
            pass
        self._remove_or_tell()

    def _stop(self) -> None:
        seconds = self._container.stop_grace_seconds if self._ready else UNREADY_GRACE_SECONDS
        finish = ": requests in flight may finish" if self._ready else ""
        self._say(f"stopping {self._running.name}, within {duration(seconds)}{finish}; Ctrl-C again kills it")
        stopping: Events[bool] = Events(self._signals)

        def stop(put: Put[bool]) -> None:
            self._running.stop(seconds)
            put(True)

        stopping.start(stop)
        stopped = False
        while self._followed or not stopped:
            stopped = stopped or bool(stopping.next(0.0))
            # The terminal that the log goes to may be gone; stop the container anyway.
            with suppress(OSError):
                self._next(0.1)

    def _remove_or_tell(self) -> None:
        try:
            self._running.remove()
            self._say(f"{self._running.name} is down")
        except ArtifactError as error:
            self._say(
                f"note: {self._running.name} may still run ({error}); once the engine answers again: "
                f"recipe serve down {as_typed(self._artifact.folder)}"
            )

    def _next(self, seconds: float | None) -> ContainerOutput | Exit | Ready | None:
        """Return the next event; show it if it is log output."""
        try:
            event = self._events.next(seconds)
        except ArtifactError:
            self._followed = False
            raise
        if isinstance(event, Exit):
            self._followed = False
        if isinstance(event, ContainerOutput):
            self._last.extend(line for line in event.text.splitlines() if line.strip())
            stream = sys.stderr if event.error else sys.stdout
            stream.write(event.text)
            stream.flush()
        return event

    def _report(self, put: Put[ContainerOutput | Exit | Ready]) -> None:
        """Put the container's output, and then its end. Runs in a thread."""
        streams = Lines(self._hide), Lines(self._hide)
        for pieces in self._running.output():
            for error, (lines, piece) in enumerate(zip(streams, pieces, strict=True)):
                if piece and (text := lines.feed(piece)):
                    put(ContainerOutput(bool(error), text))
        for error, lines in enumerate(streams):
            if text := lines.end():
                put(ContainerOutput(bool(error), text))
        put(self._running.wait())

    def _ask(self, put: Put[ContainerOutput | Exit | Ready]) -> None:
        """Poll until the server answers, then put Ready. Runs in a thread."""
        client = Client(self._container.health_url.removesuffix("/health"), api_key="", timeout=5.0)
        while not client.healthy():
            time.sleep(ASK_SECONDS)
        put(Ready())

    def _why(self, end: Exit) -> tuple[str, str]:
        """Return why a server ended unexpectedly, and what to do."""
        look = "the reason is in its log, above"
        if end.out_of_memory:
            limit = f"its limit of {self._memory}" if self._memory else "what the machine has"
            said = f"it ran out of memory, with more than {limit}"
            look = "a larger --memory, or none" if self._memory else "use a machine with more memory"
        elif end.code == 137:
            said = (
                "it was killed (exit status 137) by another command, or because the machine ran out of memory"
            )
            look = "dmesg shows whether the kernel killed it"
        elif end.code in STOPPED:
            said = f"it was stopped by another command (exit status {end.code})"
        elif end.code > 128:
            said = f"it ended by a signal (exit status {end.code})"
        else:
            said = f"it ended with exit status {end.code}"
        when = "" if self._ready else " before it was ready"
        detail = f" ({end.error})" if end.error else ""
        return f"{self._running.name} has stopped{when}: {said}{detail}{self._last_lines()}", look

    def _last_lines(self) -> str:
        if not self._last:
            return "; its log is empty"
        return "; its log ends:\n" + "\n".join(f"    {_short(line)}" for line in self._last)
