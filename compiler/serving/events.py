"""Signals, and what threads report, as one stream that the main thread reads.

Whatever waits for the engine or the server waits in a thread of its own. So a signal is seen at once, and
never breaks into a request half-way: a container that was created is always known, and can be removed.
"""

from __future__ import annotations

import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Generic, TypeVar

from recipec.runtime.interrupts import Interrupted

__all__ = ["Events", "Interrupted", "Put", "Signals"]

T = TypeVar("T")
Put = Callable[[T], None]

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

TICK_SECONDS = 0.1
"""How long a signal may go unseen."""


class Signals:
    """Takes note of SIGINT, SIGTERM and SIGHUP within a `with` block; a signal that is ignored stays so."""

    def __init__(self) -> None:
        self._arrived: list[int] = []
        self._answered = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        for signum in HANDLED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._previous[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self._arrived.append(signum)

    def check(self) -> None:
        """Raises Interrupted, once for each signal."""
        if len(self._arrived) > self._answered:
            self._answered += 1
            raise Interrupted(self._arrived[self._answered - 1])

    def each(self, items: Callable[[], Iterable[T]]) -> Iterator[T]:
        """The items as they come, which another thread waits for.

        Raises:
            Interrupted: at a signal; the thread is left to itself.
        """
        events: Events[tuple[T] | None] = Events(self)

        def source(put: Put[tuple[T] | None]) -> None:
            for item in items():
                put((item,))
            put(None)

        events.start(source)
        while (event := events.next()) is not None:
            yield event[0]

    def result(self, function: Callable[[], T]) -> T:
        """What a function returns, which another thread runs.

        Raises:
            Interrupted: at a signal; the thread is left to itself.
        """
        return next(self.each(lambda: iter([function()])))


@dataclass(frozen=True)
class _Fault:
    """What a thread ended with."""

    error: BaseException


class Events(Generic[T]):
    """What several threads put, in the order in which it came."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._queue: queue.SimpleQueue[T | _Fault] = queue.SimpleQueue()

    def start(self, source: Callable[[Put[T]], None]) -> None:
        """Runs a function that puts events, in a thread that does not keep the process alive."""

        def run() -> None:
            try:
                source(self._queue.put)
            except BaseException as error:
                self._queue.put(_Fault(error))

        threading.Thread(target=run, daemon=True).start()

    def next(self, seconds: float | None = None) -> T | None:
        """The next event; None when none came within `seconds`.

        Raises:
            Interrupted: at a signal.
            Exception: what a source ended with.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            self._signals.check()
            left = TICK_SECONDS if deadline is None else min(TICK_SECONDS, deadline - time.monotonic())
            try:
                event = self._queue.get(timeout=max(left, 0.0))
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                continue
            if isinstance(event, _Fault):
                raise event.error
            return event
