"""Run Python scripts in processes that have already imported most of their packages.

Each process is forked from one server process. The server has imported the packages that every script would
spend seconds on, and has neither Python threads nor devices. Everything else is new in each process: streams,
environment, session, exit status, and an artifact's copy of runtime/, unless the server has to import it.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

import pytest

PACKAGES = (
    *(
        "numpy",
        "jax",
        "jax.numpy",
        "flax.nnx",
        "optax",
        "orbax.checkpoint",
        "grain",
        "datasets",
        "tokenizers",
    ),
    *("transformers", "transformers.models.auto.tokenization_auto", "safetensors", "qwix", "tensorboardX"),
    "tunix.sft.peft_trainer",
)
"""The packages that the scripts of artifacts import."""


class Preloaded:
    """The server process from which scripts are forked."""

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = PACKAGES) -> None:
        """Start the process.

        Args:
            environment: environment of the scripts; packages read it only once, when they are imported.
            modules: modules to import there; none of them may start a thread, because a fork would lose it.
        """
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.preloaded", *modules],
            cwd=Path(__file__).resolve().parents[1],
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], stdout: str, stderr: str
    ) -> Script:
        """Start a script, or a module by -m, that appends its output to two files."""
        asked = {
            "arguments": list(arguments),
            "environment": dict(environment),
            "cwd": os.getcwd(),
            "stdout": stdout,
            "stderr": stderr,
        }
        return Script(self, self.ask(asked))

    def start(self, command: Sequence[str], stdout: IO[bytes], env: Mapping[str, str], **_: Any) -> Script:
        """Replace subprocess.Popen for a script whose output goes to one file."""
        arguments = command[2:] if command[1] == "-P" else command[1:]  # the fork builds its path as -P does
        return self.fork(arguments, env, stdout.name, stdout.name)

    def ask(self, asked: Mapping[str, Any]) -> Any:
        """Send a request to the process and return its answer: see `serve`."""
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()


@contextmanager
def preloaded_scripts(folder: Path) -> Iterator[None]:
    """Make compiler.rehearse.pipeline fork its scripts, for runs in this folder, until the block ends."""
    from recipec.compiler.rehearse import (  # this also imports runtime/, which no script may find imported
        artifact_run,
        pipeline,
    )
    from tests.conftest import IN_ONE_PIECE

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact_run, "QUICK_TO_COMPILE", f"{artifact_run.QUICK_TO_COMPILE} {IN_ONE_PIECE}")
        server = Preloaded(artifact_run.script_environment(folder))
        try:
            patch.setattr(pipeline.subprocess, "Popen", server.start)
            yield
        finally:
            server.close()


class Script:
    """A running script, with the part of Popen's interface that compiler.rehearse.pipeline needs."""

    def __init__(self, server: Preloaded, pid: int) -> None:
        self._server = server
        self._status: int | None = None
        self.pid = pid

    def poll(self) -> int | None:
        """Return the exit status (negative for the signal that ended it), or None while it runs."""
        if self._status is None:
            self._status = self._server.ask({"wait": self.pid})
        return self._status

    def wait(self, timeout: float = 600.0) -> int:
        """Wait for the end and return the exit status."""
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return status


def serve(modules: Sequence[str]) -> None:
    """Answer requests, one JSON object a line, until stdin ends.

    The answer to a request with "arguments" is the id of the process that runs them. The answer to {"wait":
    PID} is the exit status, or null while the process runs.
    """
    for name in modules:
        import_module(name)
    assert threading.active_count() == 1, threading.enumerate()
    gc.collect()
    gc.freeze()  # a script's collections visit none of what the server has imported
    for line in sys.stdin:
        asked = json.loads(line)
        answer: int | None
        if "wait" in asked:
            found, status = os.waitpid(asked["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if found else None
        else:
            answer = os.fork()
            if answer == 0:
                _run(asked)
        print(json.dumps(answer), flush=True)


def _run(asked: Mapping[str, Any]) -> NoReturn:
    """Run a request in the forked process."""
    status = 1
    try:
        os.setsid()
        os.chdir(asked["cwd"])
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(asked[name], os.O_WRONLY | os.O_APPEND), number)
        os.environ.clear()
        os.environ.update(asked["environment"])
        arguments = asked["arguments"]
        sys.path[0] = asked["environment"].get("PYTHONPATH", "")
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(sys.argv[1:])
    os._exit(0)  # the imported packages have nothing to clean up
