"""Start a script as several processes of this machine, which find each other over loopback.

    python runtime/hosts/local.py COUNT SCRIPT [ARGUMENT...]

Use it to try, with virtual CPU devices, programs that run on several hosts elsewhere. A signal is sent to all
of the processes. The exit status is 0 if all ended with 0, else the status of the first that did not.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from types import FrameType

USAGE = "usage: local.py COUNT SCRIPT [ARGUMENT...]"


def main(argv: list[str]) -> int:
    """Run the processes to their end, and return the exit status."""
    if len(argv) < 2 or not argv[0].isdigit() or int(argv[0]) < 1:
        print(USAGE, file=sys.stderr)
        return 2
    count = int(argv[0])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    shared = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": argv[0]}
    processes: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on() -> None:
        while received:
            signum = received.pop(0)
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signum)

    def receive(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        # Before all are started, the signal waits for the rest, so that none is left out.
        if len(processes) == count:
            pass_on()

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, receive)
    for number in range(count):
        environment = {**os.environ, **shared, "JAX_PROCESS_ID": str(number)}
        processes.append(subprocess.Popen([sys.executable, *argv[1:]], env=environment))
    pass_on()
    statuses = [process.wait() for process in processes]
    failed = next((status for status in statuses if status), 0)
    return 128 - failed if failed < 0 else failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
