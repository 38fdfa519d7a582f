"""An end to what may take for ever: regular expressions and templates that somebody else wrote."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

MATCH_SECONDS = 60.0
"""That expressions may take on the names of a model's projections."""


class TooLong(BaseException):
    """The time is over. No `except Exception` on the way holds it up."""


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Ends the block after a time: Python and its engine of regular expressions let signals in.

    In the main thread alone: elsewhere the block is not ended. A timer that runs already goes on behind it.

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
