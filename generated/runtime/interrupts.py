"""Ctrl-C and termination: a run stops after the step it is in, and says what it kept."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import Any


class Interrupted(BaseException):
    """The run is to end because of a signal. No Exception, so that no library swallows it.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum

    @property
    def name(self) -> str:
        return signal.Signals(self.signum).name


class Interrupts:
    """Handles SIGINT and SIGTERM within a `with` block.

    Outside `deferred` work a signal raises Interrupted at once. While work is deferred the first one
    is only noted in `requested`, and the second raises.
    """

    def __init__(self) -> None:
        self.deferred = False
        self.requested: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if not self.deferred or self.requested is not None:
            raise Interrupted(signum)
        self.requested = signum
        print("\nstopping after this step; once more to stop at once", file=sys.stderr, flush=True)
