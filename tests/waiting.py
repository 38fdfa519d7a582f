"""Functions that wait for a process or thread. Their limits only catch hangs, even on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

SECONDS = 60.0


def until(condition: Callable[[], object], seconds: float = SECONDS) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it did not come within {seconds:.0f} s"
        time.sleep(0.01)


def running(pid: int) -> bool:
    """Return whether a process still runs. A process that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def gone(pid: int) -> bool:
    """Return whether a process ends."""
    until(lambda: not running(pid))
    return True
