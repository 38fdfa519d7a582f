"""A run's folder while it is written: the run's record, its state, its metrics and its newest checkpoint."""

from __future__ import annotations

import os
import re
import socket
from typing import Any

from recipec.compiler.report.metrics import Metrics
from recipec.compiler.report.run_folder import METRICS, Folder, Status
from recipec.runtime.addresses import read_by_orbax
from recipec.runtime.checkpoints.manifest import COMMITTED
from recipec.runtime.checkpoints.record import LOCK
from recipec.runtime.metrics.run_state import FILE as STATE

SEEN = 256
"""Bytes before the read position; if they changed, the file was written anew."""
WAITING, TRAINING = "waiting", "training"
DONE, STOPPED, FAILED, KILLED = "done", "stopped", "failed", "killed"
"""The states of a run. A run is killed if its process is gone, and no state was written at its end."""


class LiveRun:
    """A run whose folder is read again and again, also before it exists.

    Attributes:
        lock: content of recipe.lock.json; {} until it exists.
        state: content of state.json, which says how the run ended or that it has not; {} without one.
        metrics: as logged so far.
        logged: the status of metrics.jsonl; None if it does not exist.
        saved: the newest checkpoint and its age in seconds, None if not known; None without a checkpoint.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.lock: dict[str, Any] = {}
        self.state: dict[str, Any] = {}
        self.logged: Status | None = None
        self.saved: tuple[int, float | None] | None = None
        self.forget()

    def forget(self) -> None:
        """Forget all metrics, because their file was written anew."""
        self.metrics = Metrics()
        self._read, self._before = 0, b""

    def look(self, entry: dict[str, float]) -> None:
        """Look at the numbers of a new line."""

    def update(self) -> None:
        """Read what is new."""
        self.lock = self.lock or self.folder.object(LOCK)
        self.state = self.folder.object(STATE)
        if self.state.get("state") == TRAINING and self._is_gone():
            # The run may have written its last lines after they were read.
            self.state = self.folder.object(STATE)
            if self.state.get("state") == TRAINING:
                self.state["state"] = KILLED
        before, self.logged = self.logged, self.folder.status(METRICS)
        if self.logged != before:
            self._read_lines(self.logged.size if self.logged else 0)
        self.saved = self._newest()

    def _read_lines(self, size: int) -> None:
        """Read the new lines, or all lines if --resume has truncated and continued the file."""
        start = self._read - len(self._before)
        new = (self.folder.read(METRICS, start, size) or b"") if size >= self._read else b""
        if not new.startswith(self._before):
            self.forget()
            new = self.folder.read(METRICS, 0, size) or b""
        fresh, self._before = new[len(self._before) :], new[-SEEN:]
        self._read += len(fresh)
        for entry in self.metrics.take(fresh):
            self.look(entry)

    def recorded(self, *path: str) -> Any:
        """Return a value of the resolved recipe in the record, None if it does not exist."""
        recipe = self.lock.get("recipe")
        for key in path:
            recipe = recipe.get(key) if isinstance(recipe, dict) else None
        return recipe

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run, None if not known."""
        return positive(self.state.get("total")) or positive(self.recorded("train", "steps"))

    @property
    def outcome(self) -> str:
        """One of the states above. For a run of an earlier version it is derived from the steps alone."""
        state = self.state.get("state")
        if state in (TRAINING, DONE, STOPPED, FAILED, KILLED):
            return str(state)
        if self.total is not None and self.metrics.last_step >= self.total:
            return DONE
        return TRAINING if self.metrics.lines else WAITING

    @property
    def ended(self) -> bool:
        return self.outcome not in (WAITING, TRAINING)

    @property
    def reason(self) -> str:
        """Why it stopped, failed or was done early; "" if no reason was recorded."""
        return clean(self.state.get("reason") or "")

    def _newest(self) -> tuple[int, float | None] | None:
        """Return the newest checkpoint and its age; folders are named by step, or as in transformers."""
        matches = [re.fullmatch(r"(?:checkpoint-)?(\d{1,12})", name) for name in self.folder.folders()]
        for step, name in sorted(((int(match[1]), match[0]) for match in matches if match), reverse=True):
            # In a bucket, a step's folder has its final name before it is complete, and folders have no time.
            marked = name.isdigit() and read_by_orbax(self.folder.name)
            status = self.folder.status(f"{name}/{COMMITTED}" if marked else name)
            if status is not None or not marked:
                return step, status.age if status else None
        return None

    def _is_gone(self) -> bool:
        """Return whether the training process has ended, as far as this machine can tell."""
        pid, here = self.state.get("pid"), self.state.get("host") == socket.gethostname()
        if not here or not isinstance(pid, int) or self.folder.system:
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            pass
        return False


def positive(value: Any) -> int | None:
    """Return a value of an untrusted file if it is a positive number, else None."""
    return value if isinstance(value, int) and value > 0 else None


def clean(value: object) -> str:
    """Return a text from a file without terminal control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))
