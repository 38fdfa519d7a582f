"""Signals and reports from threads, as one stream of events that the main thread reads.

Calls that wait for the engine or the server run in their own threads. The main thread therefore sees a signal
at once, and a signal never interrupts a request half-way: a container that was created is always known, and
can be removed.
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
"""Longest delay until a signal is noticed."""


class Signals:
    """Record SIGINT, SIGTERM and SIGHUP within a `with` block; ignored signals stay ignored."""

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
        """Raise Interrupted, once for each signal."""
        if len(self._arrived) > self._answered:
            self._answered += 1
            raise Interrupted(self._arrived[self._answered - 1])

    def each(self, items: Callable[[], Iterable[T]]) -> Iterator[T]:
        """Yield items as they arrive from another thread.

        Raises:
            Interrupted: at a signal; the thread keeps running on its own.
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
        """Run a function in another thread and return its result.

        Raises:
            Interrupted: at a signal; the thread keeps running on its own.
        """
        return next(self.each(lambda: iter([function()])))


@dataclass(frozen=True)
class _Fault:
    """The exception that ended a thread."""

    error: BaseException


class Events(Generic[T]):
    """Events that several threads put, in order of arrival."""

    def __init__(self, signals: Signals) -> None:
        self._signals = signals
        self._queue: queue.SimpleQueue[T | _Fault] = queue.SimpleQueue()

    def start(self, source: Callable[[Put[T]], None]) -> None:
        """Run a function that puts events, in a daemon thread."""

        def run() -> None:
            try:
                source(self._queue.put)
            except BaseException as error:
                self._queue.put(_Fault(error))

        threading.Thread(target=run, daemon=True).start()

    def next(self, seconds: float | None = None) -> T | None:
        """Return the next event; None if none came within `seconds`.

        Raises:
            Interrupted: at a signal.
            Exception: the exception that ended a source.
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
