"""What a benchmark runs under: one at a time in a folder, and signals that end it in order."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from runtime.errors import UserError


class Interrupted(Exception):
    """Ctrl-C, or a signal that asks to end.

    Attributes:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keeps a second benchmark out of a folder of results, and makes the folder.

    Raises:
        UserError: there is another one, or no such folder can be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(
            f"{folder} cannot hold results: {error.strerror}", "give another folder with --results"
        ) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise UserError(
            f"another benchmark is writing to {folder}",
            "wait for its end, or give another folder with --results",
        ) from None
    try:
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Within the block, signals that ask to end raise Interrupted."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted(number)

    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    # A signal that is ignored, such as nohup's, stays so.
    before = {n: signal.signal(n, interrupt) for n in asked if signal.getsignal(n) != signal.SIG_IGN}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
