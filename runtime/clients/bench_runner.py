"""Runs `vllm bench serve` where vLLM is installed: on this machine, or in the server's container."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ..errors import UserError
from .client import KEY_VARIABLE

CLIENT_KEY = "OPENAI_API_KEY"
"""The environment variable from which vLLM's client reads the key."""

PREPARE = """\
umask 077
mkdir "$1" && : >"$1/go"
"""
"""Creates the folder of a measurement."""

START = f"""\
umask 077
echo $$ >"$1/pid" && test -e "$1/go" || exit 1
shift
export {CLIENT_KEY}="${{{KEY_VARIABLE}-}}"
exec "$@"
"""
"""Copies the key from the server's variable to the client's within the environment. So no argument holds it,
and a key that the user has for another service is not sent to this server."""

STOP = """\
rm -f "$1/go"
test -f "$1/pid" || exit 0
kill -TERM "$(cat "$1/pid")" 2>/dev/null || exit 0
tries="$2"
while [ "$tries" -gt 0 ]; do
    sleep 0.1
    kill -0 "$(cat "$1/pid")" 2>/dev/null || exit 0
    tries=$((tries - 1))
done
kill -KILL "$(cat "$1/pid")" 2>/dev/null
"""
"""Ends what START has started or is about to start. In a container, a process outlives `docker exec`.
The arguments are the folder, and tenths of a second from SIGTERM to SIGKILL."""

GRACE_SECONDS = 10.0
ASIDE_SECONDS = 60.0
"""Timeout of an auxiliary command, such as reading a file or removing a folder."""


class TimedOut(Exception):
    """A command exceeded its time and was stopped."""


def new_folder() -> str:
    """Return a new name for the folder of one measurement."""
    return f"/tmp/recipe-bench-{secrets.token_hex(8)}"


class Processes:
    """The place where vLLM is installed. Methods take the name of a measurement's `folder` in that place.

    Args:
        prefix: words before a command that run it where vLLM is, such as `docker exec NAME`; () for this
            machine.
    """

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        self.prefix = tuple(prefix)

    def check(self) -> None:
        """Raise UserError if vLLM is not installed there."""
        try:
            done = self._aside("command -v vllm")
        except OSError as error:
            raise self._no_vllm(f"{self.prefix[0]} does not start: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise self._no_vllm(f"{self.prefix[0]} gave no answer within {ASIDE_SECONDS:g} s") from None
        if done.returncode != 0:
            last_lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise self._no_vllm(last_lines[-1] if last_lines else "no command vllm")

    def _no_vllm(self, reason: str) -> UserError:
        if not self.prefix:
            return UserError("vllm is not on PATH", "install vllm, or start the server's container")
        return UserError(
            f"the server's container has no vllm to measure with: {reason}",
            "start the container first; or put vllm on PATH, and name the server with --url",
        )

    def run(self, folder: str, words: Sequence[str], log: Path, seconds: float) -> int:
        """Run a command, write its output to `log`, and return its status; end it if the wait is interrupted.

        Raises:
            TimedOut: the command ran longer than `seconds`.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._aside(PREPARE, folder)
        command = [*self.prefix, "sh", "-c", START, "sh", folder, *words]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise TimedOut from None
        finally:
            if process.returncode is None:
                self._end(process, folder)

    def _end(self, process: subprocess.Popen[bytes], folder: str) -> None:
        try:
            if self.prefix:
                with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                    self._aside(STOP, folder, str(round(10 * GRACE_SECONDS)))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_SECONDS)
        finally:
            # This also runs if a second Ctrl-C interrupts the wait.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def read(self, folder: str, name: str) -> bytes | None:
        """Return the content of a file in `folder`; None if there is none."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            done = self._aside('cat "$1/$2"', folder, name)
            return done.stdout if done.returncode == 0 else None
        return None

    def remove(self, folder: str) -> None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._aside('rm -rf "$1"', folder)

    def _aside(self, script: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [*self.prefix, "sh", "-c", script, "sh", *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASIDE_SECONDS,
            start_new_session=True,
        )
