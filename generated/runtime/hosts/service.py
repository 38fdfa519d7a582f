"""JAX's distributed service in a process beside process 0.

JAX aborts every process whose connection to this service breaks, with a stack trace and no name. Here the
service outlives process 0 by a moment, in which the others hear who is gone and end by themselves.

    python service.py ADDRESS COUNT SECONDS     serves at HOST:PORT; ends SECONDS after its stdin does
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LINGER = 5.0
"""Seconds that the service stays when process 0 is gone."""
NEVER = 365 * 24 * 3600
"""Seconds until JAX itself would take a process for dead: who is gone is found out here, and earlier."""

_serving: list[subprocess.Popen[bytes]] = []
"""Kept for the life of this process: with the pipe to it the service ends."""


def start(count: int, address: str = "") -> int:
    """Starts the process that serves; it ends by itself after this one.

    Args:
        count: processes of the run.
        address: of this machine, where they reach it; every one where it is "".

    Returns:
        The port where it serves.

    Raises:
        OSError: when it does not start.
    """
    port = _free_port()
    every = "::" if socket.has_dualstack_ipv6() else "0.0.0.0"
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).resolve()), _at(address or every, port), str(count), str(LINGER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # a Ctrl-C is for process 0
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != b"ready":
        raise OSError(f"JAX's distributed service did not start on port {port}")
    _serving.append(process)
    return port


def connect(host: str, port: int, count: int, number: int, seconds: float) -> None:
    """Connects this process's JAX with that of the others. Nothing may have asked JAX for devices before.

    As jax.distributed.initialize, which would have process 0 serve by itself, and would take SIGTERM over.

    Args:
        seconds: that the others may take to do the same.
    """
    import jax
    from jax._src import distributed
    from jax._src.lib import _jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    state: Any = distributed.global_state
    state.coordinator_address = _at(host, port)
    state.process_id, state.num_processes = number, count
    state.client = _jax.get_distributed_runtime_client(
        state.coordinator_address,
        number,
        init_timeout=int(seconds),
        shutdown_timeout=60,
        heartbeat_timeout=NEVER,
        use_compression=True,
    )
    state.client.connect()


def disconnect() -> None:
    """Ends the connection of a run that all processes are done with."""
    import jax

    jax.distributed.shutdown()


def _free_port() -> int:
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _serve(address: str, count: int, seconds: float) -> None:
    from jaxlib import _jax  # type: ignore[attr-defined]

    service = _jax.get_distributed_runtime_service(
        address, count, heartbeat_timeout=NEVER, shutdown_timeout=60
    )
    print("ready", flush=True)
    while os.read(0, 4096):
        continue
    time.sleep(seconds)
    del service
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
