"""Guard against input of other people that never ends: pipes and devices instead of files, and regular
expressions and templates that take too long. Only the standard library."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from .errors import UserError

ENDLESS = "is not a regular file, but a pipe, a device or similar"
INTO_A_FILE = "write its content to a file, and give that file"


def is_endless(path: str | Path) -> bool:
    """Return whether a path is a pipe, a device or the like, which may block or never end."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def check_ends(path: str | Path, name: str) -> None:
    """Refuse a path that `is_endless`, before it is opened.

    Raises:
        UserError: with `name` for the file, and advice.
    """
    if is_endless(path):
        raise UserError(f"{name} {ENDLESS}", INTO_A_FILE)


MATCH_SECONDS = 60.0
"""Time limit of expressions on the names of a model's projections."""


class TooLong(BaseException):
    """The time is over. `except Exception` does not catch it."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """End the block after a time: Python and its regular expression engine react to signals.

    It works only in the main thread. A timer that is already running continues after the block.

    Raises:
        TooLong: the block took longer.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong

    start = time.monotonic()
    before = signal.signal(signal.SIGALRM, end)
    left, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, left - (time.monotonic() - start)))
