"""The log file of a process: what it did and when, by its own clock."""

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
    """Write lines with the time in UTC, printed text too. Nothing stops if the file cannot be written."""

    def __init__(self) -> None:
        self._file: io.TextIOWrapper | None = None
        self._open_line = ""
        self._lock = threading.RLock()

    def open(self, folder: Path, number: int, count: int) -> None:
        """Continue in FOLDER/logs/process-NUMBER.log."""
        with suppress(OSError):
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
            path = folder / FOLDER / f"process-{number}.log"
            self._file = path.open("a", encoding="utf-8", buffering=1)
        self.say(f"process {number} of {count} on {socket.gethostname()}, pid {os.getpid()}")

    def say(self, text: str) -> None:
        """Write a line."""
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
