"""Write state.json next to the metrics: a run's goal, and how it ended; `recipe watch` reads it.

    state     "training", "done", "stopped" (a signal, or --steps) or "failed"
    reason    for the last two: "SIGTERM", "--steps 100", or the error's sentence; for a run that ended before
              `total`, what stopped it early; null otherwise
    total     optimizer steps of the whole run
    until     the step after which this process stops
    at        when this was written, UTC
    host, pid of the training process

If a process is killed, the state stays "training".
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ..addresses import write_whole
from ..errors import UserError
from ..interrupts import Interrupted, name_of

FILE = "state.json"


@dataclass
class Ending:
    """How the work within `recorded` ended.

    Attributes:
        failed: records that the run failed, and why.
        early: why it ended before the last step, or None.
    """

    failed: Callable[[str], None]
    early: str | None = None


@contextmanager
def recorded(
    folder: Path, total: int, until: int, publish: Callable[[Path], None] = lambda path: None
) -> Iterator[Ending]:
    """Write state.json when the work within begins and when it ends in any way.

    The run does not need the file: if it cannot be written, it is omitted.

    Args:
        folder: folder of metrics.jsonl.
        total: optimizer steps of the whole run.
        until: the step after which this process stops.
        publish: copies the file to the checkpoints if they are elsewhere.
    """

    def write(state: str, reason: str | None = None) -> None:
        record = {
            "state": state,
            "reason": reason,
            "total": total,
            "until": until,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        with suppress(OSError):
            write_whole(folder, FILE, (json.dumps(record, indent=2) + "\n").encode())
            publish(folder / FILE)

    told = False

    def tell(reason: str) -> None:
        nonlocal told
        told = True
        write("failed", reason)

    write("training")
    ending = Ending(tell)
    try:
        yield ending
    except Interrupted as interrupted:
        write("stopped", name_of(interrupted.signum))
        raise
    except UserError as error:
        write("failed", error.message)
        raise
    except BaseException as error:
        if not told:  # otherwise it follows from the recorded values
            write("failed", type(error).__name__)
        raise
    if ending.early is not None or until == total:
        write("done", ending.early)
    else:
        write("stopped", f"--steps {until}")
