"""Do work on a thread, a few items behind the caller."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from ..interrupts import held


class Behind:
    """Apply a function to each item of a queue, on a thread, at most `depth` items behind.

    The first item starts the thread. After an error the thread drops further items, so that no caller waits
    forever.
    """

    def __init__(self, work: Callable[[Any], object], depth: int) -> None:
        self._work = work
        self._items: queue.Queue[Any] = queue.Queue(depth)
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def put(self, item: Any) -> None:
        """Add an item; raise the error of the work on an earlier one."""
        with held():
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True)
                self._thread.start()
            self._items.put(item)
        self.check()

    def check(self) -> None:
        """Raise the error of the work on an earlier item."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Wait for the last item."""
        with held():
            if self._thread is not None:
                self._items.put(None)
                self._thread.join()
                self._thread = None

    def _run(self) -> None:
        while (item := self._items.get()) is not None:
            if self._error is None:
                try:
                    self._work(item)
                except BaseException as error:  # raised in the calling thread
                    self._error = error
