"""Ports of this machine for test servers, and for tests that need a port without a listener."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from random import SystemRandom

FIRST, END = 20_000, 32_000
"""Below the range from which the system assigns ports by itself (32768 and up)."""

WORKERS = 8
"""Number of workers with separate ports, so that two of a run cannot take one port between check and use."""


def _shuffled() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    ports = list(range(FIRST + worker % WORKERS, END, WORKERS))
    SystemRandom().shuffle(ports)  # so that other runs on this machine use another order
    return iter(ports)


_left = _shuffled()


def free_port() -> int:
    """Return a port without a listener, which neither another test nor the system takes meanwhile."""
    for port in _left:
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"all ports from {FIRST} to {END} that this process may take are taken")


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[int]:
    """Yield a port with a listener."""
    with socket.create_server((host, 0)) as server:
        yield server.getsockname()[1]
