"""Ctrl-C and termination: a script stops where nothing is torn apart, and says what it kept."""

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
"""What handles the process's signals."""


class Interrupted(BaseException):
    """The script is to end because of a signal. No Exception, so that no library swallows it.

    Attributes:
        signum: the signal.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Interrupts:
    """Handles SIGINT and SIGTERM within a `with` block.

    Outside `deferred` work the first signal raises Interrupted at once, or at the end of what is `held`;
    while work is deferred it is only noted in `requested`. A second one ends the process on the spot,
    whatever it is doing: a thread of its own watches for signals, for the main thread may be in a compilation
    or waiting for a device.

    Args:
        farewell: the line to print when the process ends on the spot, from the signal's number.
        handled: the signals; others keep their effect.

    Attributes:
        announced: a notice has sent the first signal: the one that follows, when the machine is shut down, is
            no second wish, and leaves the run the time that it has to save.
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
        """Runs in the main thread, as soon as Python code runs there."""
        first = self.requested is None
        self.requested = signum
        if first and not self._held:
            self._take_effect()

    def _take_effect(self) -> None:
        if self.requested is not None and not self.deferred:
            raise Interrupted(self.requested)

    def _unraisable(self, args: Any) -> None:
        """Tells of an exception that Python cannot raise; not of a signal's, which `held` raises again."""
        if not issubclass(args.exc_type, Interrupted):
            self._previous_hook(args)

    def _watch(self, receiving: socket.socket) -> None:
        """Runs beside the main thread; the system writes the number of each signal into the socket."""
        seen = 0
        while data := receiving.recv(1):
            if data[0] not in self._handled:
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


@contextmanager
def held() -> Iterator[None]:
    """Lets a signal that comes within the block take effect at its end.

    For what the main thread shares with others. Python raises a handler's exception after any call, those
    within threading and queue among them: a lock then stays taken, or a notice goes to a thread that has had
    one (Condition.notify, interrupted after it has released a waiter, releases the same one the next time),
    and what joins the thread that waits for it never returns.

    The block is short, or ends by itself; a second signal ends the process within it, too.
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
    # A signal before this block has taken effect, and this is how the work is put away; unless its exception
    # was lost, as those raised within a weak reference's callback are.
    if before is None or sys.exc_info()[1] is None:
        interrupts._take_effect()


def name_of(signum: int) -> str:
    """ "SIGTERM" for 15."""
    return signal.Signals(signum).name
