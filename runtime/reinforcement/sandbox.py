"""Run a model's code with tests, in a process that can do little harm.

The code has limits of time, memory and file sizes, no environment variables, and only the standard library.
It runs in a folder of its own, which is removed. Where Linux allows it without root, the code also has no
network and sees no other processes (namespaces), and writes only in its folder (Landlock). `Isolation` says
what this system allows.

What the sandbox does not stop: the code can read the files that this account can read. It can use all cores,
and start processes, until its time is over. It runs in the same interpreter as its tests, so code that looks
for them could make them pass. It does not protect from code that exploits a fault of the kernel. For that,
run the training in a virtual machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import resource
import secrets
import struct
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .processes import Supervised, exchange, limit_memory, read_request, supervise

FILE_BYTES = 16 * 2**20
"""The most bytes of a file that the code writes."""
OPEN_FILES = 64


@dataclass(frozen=True)
class Isolation:
    """What this system keeps code from.

    Attributes:
        network: connections to other machines and to servers of this one.
        files: writing outside of its folder.
        signals: signals to processes outside of the sandbox.
    """

    network: bool
    files: bool
    signals: bool


@dataclass(frozen=True)
class Result:
    """The result of some code.

    Attributes:
        passed: whether each test passed; False for tests that the code's end or the time limit prevented.
        isolation: None if the process ended before it could tell.
    """

    passed: list[bool]
    isolation: Isolation | None


def run_tests(code: str, tests: Sequence[str], seconds: float, memory: int) -> Result:
    """Run code, and then each test with the names that it defines.

    Args:
        tests: Python statements, such as assertions; a test passes if it raises nothing.
        seconds: the time limit for the code and all tests.
        memory: the limit in bytes.
    """
    # What the process writes on its own behalf begins with this, which the code does not get.
    token = secrets.token_hex(8)
    with tempfile.TemporaryDirectory(prefix="sandbox-", ignore_cleanup_errors=True) as folder:
        process = Supervised(__name__, flags=("-I", "-S"), env={}, cwd=folder)
        try:
            request = pickle.dumps((code, list(tests), seconds, memory, folder, token))
            (answer,) = exchange({process: request}, seconds, whole=None).values()
        finally:
            process.close()
    passed, isolation = [], None
    for line in answer.data.decode("utf-8", "replace").splitlines():
        author, _, text = line.partition(" ")
        if author == token and isolation is None:
            with suppress(ValueError, TypeError):
                isolation = Isolation(**json.loads(text))
        elif author == token and text in ("passed", "failed"):
            passed.append(text == "passed")
    return Result((passed + [False] * len(tests))[: len(tests)], isolation)


# What runs in the sandbox.


def main() -> None:
    """Run the code and the tests that a request has."""
    life = int(sys.argv[3])
    sys.path.remove(sys.argv[1])  # which may have the packages of the run
    request = read_request(os.fdopen(os.dup(0), "rb"))
    code, tests, seconds, memory, folder, token = request
    spaces = _unshare()
    supervise(life)
    answers = os.dup(1)
    empty = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(empty, descriptor)
    limits = {
        resource.RLIMIT_CPU: int(seconds) + 1,
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    for kind, number in limits.items():
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (number, number))
    limit_memory(memory, resource.RLIMIT_DATA, resource.RLIMIT_AS)
    version = _restrict(folder)
    isolation = {
        "network": "network" in spaces,
        "files": version > 0,
        "signals": "processes" in spaces or version >= 6,
    }
    os.write(answers, f"{token} {json.dumps(isolation)}\n".encode())
    names: dict[str, Any] = {"__name__": "solution"}
    with suppress(BaseException):
        exec(compile(code, "solution.py", "exec"), names)
        for test in tests:
            try:
                exec(compile(test, "test.py", "exec"), names)
                text = "passed"
            except BaseException:
                text = "failed"
            os.write(answers, f"{token} {text}\n".encode())
    os._exit(0)


_NEW_USERS, _NEW_NETWORK, _NEW_PROCESSES, _NEW_MEMORY = 0x10000000, 0x40000000, 0x20000000, 0x08000000
"""CLONE_NEWUSER, CLONE_NEWNET, CLONE_NEWPID and CLONE_NEWIPC of Linux's unshare."""


def _unshare() -> set[str]:
    """Leave the network and the processes of this machine; return which of them the system allowed.

    An account without rights needs a user namespace for it, which some systems and containers forbid. The
    processes that this one starts from now on see no others.
    """
    with suppress(OSError, AttributeError):  # not on Linux
        unshare = ctypes.CDLL(None, use_errno=True).unshare
        both = _NEW_NETWORK | _NEW_PROCESSES | _NEW_MEMORY
        for flags in (_NEW_USERS | both, both):
            if unshare(flags) == 0:
                return {"network", "processes"}
        for flags in (_NEW_USERS | _NEW_NETWORK, _NEW_NETWORK):
            if unshare(flags) == 0:
                return {"network"}
    return set()


_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
"""Landlock's system calls: the same numbers on x86-64 and Arm."""
_NO_NEW_PRIVILEGES = 38
"""PR_SET_NO_NEW_PRIVS of prctl."""
_WRITE_FILE = 1 << 1
_WRITING = {1: 0x1FF2, 2: 1 << 13, 3: 1 << 14}
"""Landlock's rights that change files, by the version that brought them: writing, removing and making them;
moving them between folders; truncating them."""
_TCP = 3
"""Binding and connecting TCP sockets, since version 4."""
_SCOPES = 3
"""Abstract sockets and signals of processes outside, since version 6."""


def _restrict(folder: str) -> int:
    """Let this process write only below a folder, and to /dev/null; return Landlock's version, 0 for none."""
    try:
        library = ctypes.CDLL(None, use_errno=True)
        version = max(0, library.syscall(_CREATE_RULESET, None, 0, 1))
    except (OSError, AttributeError):
        return 0
    if not version:
        return 0
    rights = sum(right for since, right in _WRITING.items() if version >= since)
    fields = [rights] + [_TCP] * (version >= 4) + [_SCOPES] * (version >= 6)
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = library.syscall(_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return 0
    try:
        for path, allowed in ((folder, rights), (os.devnull, rights & (_WRITE_FILE | 1 << 14))):
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                rule = struct.pack("=Qi", allowed, descriptor)
                if library.syscall(_ADD_RULE, ruleset, 1, rule, 0):
                    return 0
            finally:
                os.close(descriptor)
        library.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        return 0 if library.syscall(_RESTRICT_SELF, ruleset, 0) else version
    finally:
        os.close(ruleset)
