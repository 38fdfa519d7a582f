"""A time limit for regular expressions and templates that come from other people."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

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
