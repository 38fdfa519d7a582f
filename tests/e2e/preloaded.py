"""Python scripts in processes that have the training packages imported already.

Each is forked from one process, which has imported what every script would spend five seconds on, and has
neither threads of Python's nor devices. All else is a new process's own: streams, environment, session, exit
status, and the artifact's copy of runtime/, which is not imported here.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import IO, Any, NoReturn

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
    *("tunix.sft.peft_trainer", "tunix.sft.dpo.dpo_trainer"),
)


class Preloaded:
    """The process that scripts are forked from."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Starts it.

        Args:
            environment: as of the scripts: what packages read when they are imported is read once.
        """
        self._server = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment, "OPENBLAS_NUM_THREADS": "1"},
            text=True,
        )
        assert self._ask({}) == {"ready": True}

    def start(self, command: Sequence[str], stdout: IO[bytes], env: Mapping[str, str], **_: Any) -> Script:
        """Stands in for subprocess.Popen: a script, or a module by -m, into a file."""
        arguments = command[2:] if command[1] == "-P" else command[1:]  # its path is made as with -P
        asked = {"arguments": list(arguments), "output": stdout.name, "environment": dict(env)}
        return Script(self, self._ask(asked)["pid"])

    def status(self, pid: int) -> int | None:
        """The exit status of a script, below 0 the signal that ended it; None while it runs."""
        found: int | None = self._ask({"status": pid})["status"]
        return found

    def close(self) -> None:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(timeout=30)
        self._server.stdout.close()

    def _ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(asked) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer


class Script:
    """A script that runs, with as much of Popen as compiler.pipeline needs."""

    def __init__(self, server: Preloaded, pid: int) -> None:
        self._server = server
        self.pid = pid

    def poll(self) -> int | None:
        return self._server.status(self.pid)

    def wait(self, timeout: float = 600.0) -> int:
        end = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return status


def serve() -> None:
    """Answers requests until stdin ends."""
    for package in PACKAGES:
        import_module(package)
    ended: dict[int, int] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if "status" in asked:
            pid = asked["status"]
            if pid not in ended and (found := os.waitpid(pid, os.WNOHANG))[0]:
                ended[pid] = os.waitstatus_to_exitcode(found[1])
            answer: dict[str, Any] = {"status": ended.get(pid)}
        elif "arguments" in asked:
            pid = os.fork()
            if pid == 0:
                _run(asked)
            answer = {"pid": pid}
        else:
            answer = {"ready": True}
        print(json.dumps(answer), flush=True)


def _run(asked: dict[str, Any]) -> NoReturn:
    """The forked process."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(asked["output"], os.O_WRONLY | os.O_APPEND)
        for stream, target in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(stream, target)
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
    serve()
    os._exit(0)  # what was imported has nothing to put away
