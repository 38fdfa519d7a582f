"""Processes that run other people's code, and end together with everything that they start.

A supervisor is the parent of the code's process. It waits until that process ends, or until this one does,
which closes a pipe between them in any case. Then the supervisor kills all descendants, also those that left
its group, and ends as the code's process ended. Only the standard library, because a sandbox for each
completion starts with this module.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import resource
import select
import selectors
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..interrupts import held

MOST_ANSWER = 64 * 2**20
"""The most bytes of an answer. A process that writes more is ended."""
MOST_OUTPUT = 64 * 2**10
"""The bytes of output that are kept in each exchange: the first ones."""
ENDING_SECONDS = 10.0
"""After this time a supervisor that did not end is killed."""
KILLING_SECONDS = 5.0
"""The time that a supervisor takes to kill descendants that keep starting others."""

_LENGTH = struct.Struct("<Q")
_PROGRAM = (
    "import importlib, sys; sys.path.insert(0, sys.argv[1]); importlib.import_module(sys.argv[2]).main()"
)
_SET_CHILD_SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER of Linux's prctl: orphaned descendants become children of this process."""


class Supervised:
    """A process that runs `main` of a module of this package, under a supervisor.

    The module's main calls `supervise` first, and reads requests from stdin. stderr is output. `exchange`
    sends requests.

    Args:
        module: its name, below which the package's root is found.
        flags: of the Python interpreter.
        more: keyword arguments of subprocess.Popen: env, cwd.
    """

    def __init__(self, module: str, flags: Sequence[str] = ("-P",), **more: Any) -> None:
        root = Path(__file__).absolute().parents[__name__.count(".")]
        with held():
            inherited, kept = os.pipe()
            # As a file object, which closes the pipe even if this object is lost.
            self._life = os.fdopen(kept, "wb", 0)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, *flags, "-c", _PROGRAM, str(root), module, str(inherited)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    pass_fds=(inherited,),
                    start_new_session=True,
                    bufsize=0,
                    **more,
                )
            finally:
                os.close(inherited)
        for stream in self._streams:
            os.set_blocking(stream.fileno(), False)

    @property
    def requests(self) -> Any:
        """Return the pipe of requests, unbuffered."""
        return self._process.stdin

    @property
    def answers(self) -> Any:
        """Return the pipe of answers, unbuffered."""
        return self._process.stdout

    @property
    def output(self) -> Any:
        """Return the pipe of what the code prints, unbuffered."""
        return self._process.stderr

    @property
    def _streams(self) -> tuple[Any, ...]:
        return self.requests, self.answers, self.output

    def close(self, ended: bool = False) -> int:
        """Kill the process and everything that it started; return its exit status, negative for a signal.

        Args:
            ended: whether the process has ended, so that its own status is waited for.
        """
        with held():
            if ended:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(ENDING_SECONDS)
            self._life.close()
            try:
                status = self._process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                self._process.kill()
                status = self._process.wait()
            for stream in self._streams:
                with suppress(OSError):
                    stream.close()
        return status


@dataclass
class Answer:
    """What came back from a process.

    Attributes:
        data: the answer, or the part of it that came.
        output: the first MOST_OUTPUT bytes that the code printed.
        ended: "" if the answer is whole, "died" if the process ended or closed its pipe before that, "late"
            if the time was over, "long" if the answer was longer than MOST_ANSWER.
    """

    data: bytearray = field(default_factory=bytearray)
    output: bytearray = field(default_factory=bytearray)
    ended: str = ""


def exchange(
    requests: Mapping[Supervised, bytes], seconds: float, whole: bytes | None = b"\n"
) -> dict[Supervised, Answer]:
    """Send each process its request, and wait for all answers, in one thread.

    Args:
        requests: pickled, by process.
        seconds: the time limit.
        whole: the end of an answer; None for the end of the process.

    Returns:
        The answers by process. After an answer that ended early, the process has to be closed.
    """
    deadline = time.monotonic() + seconds
    answers = {process: Answer() for process in requests}
    left = {process: memoryview(_LENGTH.pack(len(data)) + data) for process, data in requests.items()}
    waiting = set(requests)
    with closing(selectors.DefaultSelector()) as selector:
        for process in requests:
            selector.register(process.requests, selectors.EVENT_WRITE, process)
            selector.register(process.answers, selectors.EVENT_READ, process)
            selector.register(process.output, selectors.EVENT_READ, process)
        while waiting:
            time_left = deadline - time.monotonic()
            if time_left <= 0:
                for process in waiting:
                    answers[process].ended = "late"
                break
            for key, _ in selector.select(time_left):
                process, stream = key.data, key.fileobj
                answer = answers[process]
                if stream is process.requests:
                    left[process] = left[process][_write(stream, left[process]) :]
                    if not left[process]:
                        selector.unregister(stream)
                    continue
                data = _read(stream)
                if not data:
                    selector.unregister(stream)
                if stream is process.output:
                    answer.output += data[: MOST_OUTPUT - len(answer.output)]
                    continue
                answer.data += data
                if whole is not None and answer.data.endswith(whole):
                    waiting.discard(process)
                elif not data:
                    answer.ended = "died" if whole is not None else ""
                    waiting.discard(process)
                elif len(answer.data) > MOST_ANSWER:
                    answer.ended = "long"
                    waiting.discard(process)
    for process, answer in answers.items():
        # Printed before the answer. A thread of the function may print without end.
        answer.output += _read(process.output)[: MOST_OUTPUT - len(answer.output)]
    return answers


def _read(stream: Any) -> bytes:
    """Return the next bytes of a pipe, or none at its end and if there are none now."""
    try:
        return stream.read(2**16) or b""
    except OSError:
        return b""


def _write(stream: Any, data: memoryview) -> int:
    """Return how many bytes a pipe took: all, as if, after its reader has ended."""
    try:
        return stream.write(data[: 2**16]) or 0
    except OSError:
        return len(data)


# What runs in the started process.


def supervise(life: int) -> None:
    """Fork, and return in the child, where the code runs. The parent becomes its supervisor, and does not
    return.

    Args:
        life: a pipe whose other end the process that started this one has.
    """
    with suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    receiving, sending = os.pipe()
    os.set_blocking(sending, False)
    signal.set_wakeup_fd(sending, warn_on_full_buffer=False)
    signals = (signal.SIGCHLD, signal.SIGTERM)
    for number in signals:
        signal.signal(number, lambda *_: None)
    child = os.fork()
    if child == 0:
        signal.set_wakeup_fd(-1)
        for number in signals:
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (life, receiving, sending):
            os.close(descriptor)
        os.setpgid(0, 0)
        return
    # So that the pipes end when the child and its descendants do.
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(empty, descriptor)
    status = None
    while status is None:
        ready, _, _ = select.select([life, receiving], [], [])
        if life in ready or (signal.SIGTERM in os.read(receiving, 2**10)):
            break
        status = _reap(child)
    with suppress(OSError):
        os.killpg(child, signal.SIGKILL)
    deadline = time.monotonic() + KILLING_SECONDS
    while time.monotonic() < deadline and _kill_children():
        time.sleep(0.005)
    code = 0 if status is None else os.waitstatus_to_exitcode(status)
    if code < 0:
        with suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


def _reap(child: int) -> int | None:
    """Collect the ends of children, including adopted ones; return the status of one of them, if it ended."""
    status = None
    with suppress(ChildProcessError):
        while True:
            process, ended = os.waitpid(-1, os.WNOHANG)
            if process == 0:
                break
            if process == child:
                status = ended
    return status


def _kill_children() -> bool:
    """Kill the children of this process, which adopts theirs; return whether there may be more."""
    for process in _children():
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _children() -> list[int]:
    """Return the numbers of this process's children; without Linux's /proc, none."""
    children = []
    try:
        entries = os.listdir("/proc")
    except OSError:
        return []
    for entry in filter(str.isdigit, entries):
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it has ended
        if parent == os.getpid():
            children.append(int(entry))
    return children


def read_request(stream: Any) -> Any:
    """Return the next request that `exchange` sent.

    Raises:
        EOFError: there is none: the pipe was closed.
    """
    length = stream.read(_LENGTH.size)
    if len(length) < _LENGTH.size:
        raise EOFError
    return pickle.loads(stream.read(*_LENGTH.unpack(length)))


def limit_memory(number: int, *kinds: int) -> None:
    """Limit the memory of this process, and of each process that it starts, to some bytes.

    Args:
        kinds: RLIMIT_DATA, which counts private memory that can be written; RLIMIT_AS, which also counts
            address space that is only reserved, as libraries with many threads reserve it.
    """
    for kind in kinds:
        _, most = resource.getrlimit(kind)
        limit = number if most == resource.RLIM_INFINITY else min(number, most)
        with suppress(OSError, ValueError):  # not on macOS
            resource.setrlimit(kind, (limit, limit))
