"""A process of a run that only comes, waits and goes: no JAX, no training.

python member.py NUMBER COUNT PORT WHAT...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipec.runtime.errors import UserError, report
from recipec.runtime.hosts import joining, service
from recipec.runtime.hosts.crew import Crew
from recipec.runtime.hosts.discovery import ADDRESS, COUNT, NUMBER


def main(number: str, count: str, port: str, *what: str) -> int:
    os.environ |= {ADDRESS: f"127.0.0.1:{port}", COUNT: count, NUMBER: number}
    service.start = lambda count, address: 1
    service.connect = lambda *arguments: None
    service.disconnect = lambda: None
    try:
        crew = joining.join(1)
        assert isinstance(crew, Crew)
        print("joined", flush=True)
        for step, act in enumerate(what, 1):
            if act == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif act == "hang":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif act == "fail":
                crew.fail(1, "its disk is full")
            elif act == "stopped":
                crew.fail(143, "it was stopped by SIGTERM")
            elif act == "garbage":
                crew._sock.sendall(b'\x00\xff{]\n[1]\n"beat"\n')
            elif act == "nonsense":
                crew._sock.sendall(b'{"beat": "x"}\n')
            elif act == "endless":
                crew._sock.sendall(b'{"beat": [1e999, 0]}\n')
            elif act == "flood":
                crew._sock.sendall(b"x" * (3 << 20))
            elif act == "slow":
                crew.may_begin(step, None)
                time.sleep(5)
            elif act == "barrier":
                crew.barrier(f"barrier {step}")
            elif act == "wait":
                time.sleep(60)
            elif act.startswith("same="):
                crew.same("data", act, "reads other data than process 0", "put the same files on every host")
        crew.end()
    except UserError as error:
        report(error)
        return error.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
