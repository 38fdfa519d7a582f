"""Handle Ctrl-C and termination: a script stops at a safe place, and says what it kept."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from .errors import say

HANDLED = (signal.SIGINT, signal.SIGTERM)


_active: Interrupts | None = None
"""The current handler of the process's signals."""


class Interrupted(BaseException):
    """The script has to end because of a signal. A BaseException, so that no library catches it.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Interrupts:
    """Handle SIGINT and SIGTERM within a `with` block.

    Outside `deferred` work the first signal raises Interrupted at once, or at the end of a `held` block.
    During deferred work it is only recorded in `requested`. A second signal ends the process at once, at any
    place: a separate thread watches for signals, because the main thread may be compiling or waiting for a
    device.

    Args:
        farewell: returns the line to print when the process ends at once, from the signal's number.
        handled: the signals to handle; others keep their effect.

    Attributes:
        announced: a notice sent the first signal. The signal at the machine's shutdown then does not count as
            a second one, so that the run has its remaining time to save.
    """

    def __init__(
        self, farewell: Callable[[int], str] | None = None, handled: Sequence[int] = HANDLED
    ) -> None:
        self.deferred = self.announced = False
        self.requested: int | None = None
        self._farewell = farewell
        self._handled = handled
        self._held = False
        self._outer: Interrupts | None = None
        self._previous: dict[int, Any] = {}
        self._previous_descriptor = -1
        self._previous_hook = sys.unraisablehook
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._watcher: threading.Thread | None = None

    def __enter__(self) -> Interrupts:
        global _active
        if threading.current_thread() is threading.main_thread():
            self._sockets = sending, receiving = socket.socketpair()
            sending.setblocking(False)
            self._watcher = threading.Thread(target=self._watch, args=(receiving,), daemon=True)
            self._watcher.start()
            self._previous_descriptor = signal.set_wakeup_fd(sending.fileno(), warn_on_full_buffer=False)
            self._outer, _active = _active, self
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._unraisable
            for signum in self._handled:
                self._previous[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)
        if self._sockets is not None and self._watcher is not None:
            _active = self._outer
            sys.unraisablehook = self._previous_hook
            signal.set_wakeup_fd(self._previous_descriptor)
            sending, receiving = self._sockets
            sending.close()
            self._watcher.join()
            receiving.close()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, as soon as Python code runs there."""
        first = self.requested is None
        self.requested = signum
        if first and not self._held:
            self._take_effect()

    def _take_effect(self) -> None:
        if self.requested is not None and not self.deferred:
            raise Interrupted(self.requested)

    def _unraisable(self, args: Any) -> None:
        """Report an exception that Python cannot raise, except a signal's, which `held` raises again."""
        if not issubclass(args.exc_type, Interrupted):
            self._previous_hook(args)

    def _watch(self, receiving: socket.socket) -> None:
        """Watch for signals next to the main thread; the system writes each number into the socket."""
        seen = 0
        while data := receiving.recv(1):
            if data[0] not in self._handled:
                continue
            seen += 1
            if seen == 1 and self.deferred:
                say("\nstopping after this step; interrupt again to stop at once")
            elif seen > 1 + self.announced:
                self._leave(data[0])

    def _leave(self, signum: int) -> None:
        try:
            line = self._farewell(signum) if self._farewell else f"stopped by {name_of(signum)}"
            say(f"\n{line}")
            sys.stdout.flush()
        finally:
            os._exit(128 + signum)


@contextmanager
def held() -> Iterator[None]:
    """Delay the effect of a signal within the block until the block ends.

    Use it for objects that the main thread shares with other threads. Python raises a handler's exception
    after any call, also within threading and queue. Then a lock may stay taken, or a notification may go to a
    thread that already had one (an interrupted Condition.notify releases the same waiter again next time).
    Whatever joins the waiting thread would then never return.

    The block must be short, or end by itself; a second signal ends the process within it, too.
    """
    interrupts = _active
    if interrupts is None or interrupts._held or threading.current_thread() is not threading.main_thread():
        yield
        return
    interrupts._held = True
    before = interrupts.requested
    try:
        yield
    finally:
        interrupts._held = False
    # A signal from before this block has already taken effect, and this is the cleanup, unless its exception
    # was lost, as exceptions within a weak reference's callback are.
    if before is None or sys.exc_info()[1] is None:
        interrupts._take_effect()


def name_of(signum: int) -> str:
    """Return a signal's name: "SIGTERM" for 15."""
    return signal.Signals(signum).name
