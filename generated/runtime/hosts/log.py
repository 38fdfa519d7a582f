"""The file of a process: what it did and when, as its own clock has it."""

from __future__ import annotations

import io
import os
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

FOLDER = "logs"


class ProcessLog(io.TextIOBase):
    """Lines with the time in UTC. It takes what is printed too; where it cannot be written, nothing stops."""

    def __init__(self) -> None:
        self._file: io.TextIOWrapper | None = None
        self._open_line = ""
        self._lock = threading.RLock()

    def open(self, folder: Path, number: int, count: int) -> None:
        """Goes on with FOLDER/logs/process-NUMBER.log."""
        with suppress(OSError):
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            path = folder / FOLDER / f"process-{number}.log"
            self._file = path.open("a", encoding="utf-8", buffering=1)
        self.say(f"process {number} of {count} on {socket.gethostname()}, pid {os.getpid()}")

    def say(self, text: str) -> None:
        """Writes a line."""
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
        with self._lock, suppress(OSError, ValueError):
            if self._file is not None:
                self._file.write(f"{stamp} {text}\n")

    def write(self, text: str) -> int:
        with self._lock:
            *lines, self._open_line = (self._open_line + text).split("\n")
            for line in lines:
                if line.strip():
                    self.say(line)
        return len(text)

    def flush(self) -> None:
        with self._lock, suppress(OSError, ValueError):
            if self._file is not None:
                self._file.flush()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False
