"""A process of a run that only joins and runs the steps in its arguments, without training.

python member.py WHAT...
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from recipec.runtime.errors import UserError
from recipec.runtime.hosts.group import ProcessGroup
from recipec.runtime.hosts.single import SingleProcess
from recipec.runtime.interrupts import Interrupts
from recipec.runtime.training.ending import attended


def work(interrupts: Interrupts, group: SingleProcess | ProcessGroup) -> int:
    for at, what in enumerate(sys.argv[1:]):
        if what == "barrier":
            group.barrier(f"barrier {at}")
        elif what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif what == "wait":
            time.sleep(60)
        elif what == "fail":
            raise UserError("its disk is full", "make room")
        else:
            group.same("data", what, "reads other data than process 0", "put the same files on every host")
            assert group.agree("found", lambda: {"step": [4, "x" * 100_000]})["step"][0] == 4
    return 0


if __name__ == "__main__":
    sys.exit(attended(lambda signum: "stopped", 1, work))
