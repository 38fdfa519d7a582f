"""vLLM's client within the container that `recipe serve up` started, through the Docker SDK."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING

from compiler.errors import ArtifactError
from runtime.errors import UserError
from runtime.serving.bench_runner import PREPARE, START, STOP, TimedOut, tenths

if TYPE_CHECKING:
    from compiler.serving.engine import Engine, Found

GONE = 137
"""The exit status of a command whose container ended: that of SIGKILL."""

PATIENCE_SECONDS = 0.2
END_SECONDS = 15.0


class InContainer:
    """A `runtime.serving.bench_runner.Runner`.

    Args:
        engine: that has the container.
        found: the container, running.
    """

    def __init__(self, engine: Engine, found: Found) -> None:
        self._engine = engine
        self._api = engine.api
        self._found = found

    def check(self) -> None:
        status, _ = self._aside("command -v vllm")
        if status != 0:
            raise UserError(
                f"the container {self._found.name} has no vllm to measure with",
                "give --url, with vllm on PATH: the client of this machine measures then",
            )

    def run(self, folder: str, words: Sequence[str], log: Path, seconds: float) -> int:
        self._aside(PREPARE, folder)
        made = self._start(START, folder, *words)
        with log.open("wb") as file:
            reader = threading.Thread(target=self._copy, args=(made, file), daemon=True)
            reader.start()
            try:
                end = time.monotonic() + seconds
                while reader.is_alive():
                    # In short pieces, so that a signal is noticed.
                    reader.join(PATIENCE_SECONDS)
                    if time.monotonic() > end:
                        raise TimedOut
                return self._status(made)
            finally:
                if reader.is_alive():
                    self._aside(STOP, folder, tenths())
                    reader.join(END_SECONDS)

    def read(self, folder: str, name: str) -> bytes | None:
        status, data = self._aside('cat "$1/$2"', folder, name)
        return data if status == 0 else None

    def remove(self, folder: str) -> None:
        self._aside('rm -rf "$1"', folder)

    def _aside(self, script: str, *arguments: str) -> tuple[int, bytes]:
        """A short command: its exit status and what it wrote to stdout; of a container that ended, GONE."""
        try:
            made = self._start(script, *arguments)
            with self._engine.doing(f"run a command in {self._found.name}"):
                output, _ = self._api.exec_start(made, demux=True)
            return self._status(made), output or b""
        except ArtifactError:
            return GONE, b""

    def _start(self, script: str, *arguments: str) -> str:
        with self._engine.doing(f"run a command in {self._found.name}"):
            made = self._api.exec_create(self._found.id, ["sh", "-c", script, "sh", *arguments])
        identity: str = made["Id"]
        return identity

    def _copy(self, made: str, file: IO[bytes]) -> None:
        """Copies a command's output until it ends, or the engine does."""
        try:
            with self._engine.doing(f"run a command in {self._found.name}"):
                for piece in self._api.exec_start(made, stream=True):
                    file.write(piece)
                    file.flush()
        except (ArtifactError, ValueError):
            # A ValueError: the file was closed, since nobody waits any more.
            return

    def _status(self, made: str) -> int:
        try:
            with self._engine.doing(f"tell how a command in {self._found.name} ended"):
                code = self._api.exec_inspect(made)["ExitCode"]
        except ArtifactError:
            return GONE
        return GONE if code is None else int(code)
