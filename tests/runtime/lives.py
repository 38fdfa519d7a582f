"""Processes that run a train.py: started cheaply, watched, and sent signals."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.preloaded import Preloaded, Script

ROOT = Path(__file__).resolve().parents[2]

MODULES = (
    *("grain", "tensorboardX.event_file_writer", "transformers.models.auto.tokenization_auto"),
    *("runtime.data", "runtime.model.sharding", "runtime.training.train", "runtime.training.trainer"),
)
"""Modules that a run imports; runtime/ is the repository's, as in the script."""


@dataclass
class Life:
    """A process that runs a script."""

    script: Script
    log: Path

    @property
    def pid(self) -> int:
        return self.script.pid

    @property
    def status(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self.script.poll()

    def wait(self) -> int:
        """Wait for the end and return the exit status."""
        return self.script.wait()

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> bool:
        """Wait for a condition; return False if the process ends before it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"still waiting\n{self.stderr}"
            if self.status is not None:
                return False
            time.sleep(0.002)
        return True

    def send(self, signum: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.status is None:
            os.kill(self.pid, signum)

    @property
    def stdout(self) -> str:
        return Path(f"{self.log}.out").read_text()

    @property
    def stderr(self) -> str:
        return Path(f"{self.log}.err").read_text()


class Lives:
    """A starter of processes that run a train.py.

    Args:
        environment: the environment of all processes.
        logs: a folder for their output.
    """

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        self._environment, self._logs, self._count = dict(environment), logs, 0
        self._server = Preloaded(environment, MODULES)

    def begin(self, *argv: str | Path, environment: Mapping[str, str] | None = None) -> Life:
        """Start a script with its arguments.

        Args:
            environment: additional variables for this process only.
        """
        self._count += 1
        log = self._logs / f"life-{self._count}"
        streams = [f"{log}.{end}" for end in ("out", "err")]
        for stream in streams:
            Path(stream).write_text("")
        own = self._environment | dict(environment or {})
        return Life(self._server.fork([str(part) for part in argv], own, *streams), log)

    def close(self) -> None:
        self._server.close()
