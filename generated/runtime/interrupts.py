"""Ctrl-C and termination: a run stops after the step it is in, and says what it kept."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from runtime.errors import say

HANDLED = (signal.SIGINT, signal.SIGTERM)


class Interrupted(BaseException):
    """The run is to end because of a signal. No Exception, so that no library swallows it.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Interrupts:
    """Handles SIGINT and SIGTERM within a `with` block.

    Outside `deferred` work the first signal raises Interrupted at once; while work is deferred it is only
    noted in `requested`. A second one ends the process on the spot, whatever it is doing: a thread of its
    own watches for signals, for the main thread may be in a compilation or waiting for a device.

    Args:
        farewell: the line to print when the process ends on the spot, from the signal's number.

    Attributes:
        announced: a notice has sent the first signal: the one that follows, when the machine is shut down, is
            no second wish, and leaves the run the time that it has to save.
    """

    def __init__(self, farewell: Callable[[int], str] | None = None) -> None:
        self.deferred = self.announced = False
        self.requested: int | None = None
        self._farewell = farewell
        self._previous: dict[int, Any] = {}
        self._previous_descriptor = -1
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._sockets = sending, receiving = socket.socketpair()
            sending.setblocking(False)
            self._watcher = threading.Thread(target=self._watch, args=(receiving,), daemon=True)
            self._watcher.start()
            self._previous_descriptor = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
            for signum in HANDLED:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._sockets is not None and self._watcher is not None:
            signal.set_wakeup_fd(self._previous_descriptor)
            sending, receiving = self._sockets
            sending.close()
            self._watcher.join()
            receiving.close()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Runs in the main thread, as soon as Python code runs there."""
        first = self.requested is None
        self.requested = signum
        if first and not self.deferred:
            raise Interrupted(signum)

    def _watch(self, receiving: socket.socket) -> None:
        """Runs beside the main thread; the system writes the number of each signal into the socket."""
        seen = 0
        while data := receiving.recv(1):
            if data[0] not in HANDLED:
                continue
            seen += 1
            if seen == 1 and self.deferred:
                say("\nstopping after this step; once more to stop at once")
            elif seen > 1 + self.announced:
                self._leave(data[0])

    def _leave(self, signum: int) -> None:
        try:
            line = self._farewell(signum) if self._farewell else f"stopped by {name_of(signum)}"
            say(f"\n{line}")
            sys.stdout.flush()
        finally:
            os._exit(128 + signum)


def name_of(signum: int) -> str:
    """ "SIGTERM" for 15."""
    return signal.Signals(signum).name
