"""Processes that run a train.py, started at little cost: each is forked from one that has imported jax.

`Lives` starts that one; it answers requests, one JSON object a line: {"argv": [...], "log": PREFIX,
"environment": {...}} forks a process that runs a script and answers with its number; {"wait": PID,
"block": true} answers with its exit status, minus the signal's number after a signal, or null while it runs.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Life:
    """A process that runs a script."""

    lives: Lives
    pid: int
    log: Path
    status: int | None = None

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        if self.status is None:
            self.status = self.lives.ask(wait=self.pid, block=False)
        return self.status

    def wait(self) -> int:
        """Waits for the end; the exit status."""
        if self.status is None:
            self.status = self.lives.ask(wait=self.pid, block=True)
        assert self.status is not None
        return self.status

    def until(self, condition: Callable[[], bool], seconds: float = 240) -> bool:
        """Waits for a condition; False when the process ends before it holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"still waiting\n{self.stderr}"
            if self.poll() is not None:
                return False
            time.sleep(0.002)
        return True

    def send(self, signum: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    @property
    def stdout(self) -> str:
        return Path(f"{self.log}.out").read_text()

    @property
    def stderr(self) -> str:
        return Path(f"{self.log}.err").read_text()


class Lives:
    """The process that others are forked from.

    Args:
        environment: of all of them.
        logs: a folder for what they print.
    """

    def __init__(self, environment: Mapping[str, str], logs: Path) -> None:
        self._logs, self._count = logs, 0
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.lives"],
            cwd=ROOT,
            env=dict(environment),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, *argv: str | Path, environment: Mapping[str, str] | None = None) -> Life:
        """Starts a script with its arguments.

        Args:
            environment: what this process alone has besides that of all.
        """
        self._count += 1
        log = self._logs / f"life-{self._count}"
        for end in ("out", "err"):
            Path(f"{log}.{end}").write_text("")
        own = dict(environment or {})
        return Life(self, self.ask(argv=[str(part) for part in argv], log=str(log), environment=own), log)

    def ask(self, **request: Any) -> Any:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()


def main() -> None:
    """Answers requests until there are no more."""
    _preload()
    for line in sys.stdin:
        request = json.loads(line)
        if "argv" in request:
            answer = _fork(request["argv"], request["log"], request["environment"])
        else:
            found, status = os.waitpid(request["wait"], 0 if request["block"] else os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        print(json.dumps(answer), flush=True)


def _preload() -> None:
    """Imports what a run imports; nothing of it may start a thread, which a fork would lose."""
    import grain  # noqa: F401
    import tensorboardX.event_file_writer  # noqa: F401
    from transformers import AutoTokenizer  # noqa: F401

    import runtime.data
    import runtime.mesh
    import runtime.train
    import runtime.trainer  # noqa: F401

    assert threading.active_count() == 1, threading.enumerate()


def _fork(argv: list[str], log: str, environment: Mapping[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 70
    try:
        os.setsid()
        os.environ.update(environment)
        for number, end in ((0, None), (1, "out"), (2, "err")):
            flags = os.O_RDONLY if end is None else os.O_WRONLY
            os.dup2(os.open(os.devnull if end is None else f"{log}.{end}", flags), number)
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    main()
