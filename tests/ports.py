"""Ports of this machine for servers of tests, and for tests that want nobody to listen."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import SystemRandom

FIRST, END = 20_000, 32_000
"""Below the range from which the system takes the ports that it chooses itself (from 32768 on)."""

WORKERS = 8
"""Whose ports are told apart, so that no two workers of one run take the same one between look and use."""


def _shuffled() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(FIRST + worker % WORKERS, END, WORKERS))
    SystemRandom().shuffle(ports)  # other runs on this machine take theirs in another order
    return iter(ports)


_left = _shuffled()


def free_port() -> int:
    """A port on which nobody listens, and which neither another test nor the system takes meanwhile."""
    for port in _left:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"all ports from {FIRST} to {END} that this process may take are taken")


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    """A port on which something listens."""
    with socket.create_server((host, 0)) as server:
        yield server.getsockname()[1]
