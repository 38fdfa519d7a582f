"""Where a run's numbers go: metrics.jsonl and TensorBoard, behind Tunix's MetricsLogger.

metrics.jsonl has one object a line. Training: step, loss, learning_rate, grad_norm (of the step's
accumulated gradient, before clipping), of preferences rewards_chosen, rewards_rejected, rewards_margin and
rewards_accuracy, tokens (real ones of the step), tokens_per_second, step_seconds, peak_memory_bytes.
Evaluation: step, eval_loss. A number that is not finite stands as "NaN", "Infinity" or "-Infinity", as JSON
has no such numbers.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from runtime.errors import UserError

FILE = "metrics.jsonl"
FOLDER = "tensorboard"
PREFIX = "recipec"


class JsonLines:
    """A MetricsLogger backend that writes one line for each step and mode."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._entry: dict[str, Any] = {}

    def log_scalar(self, event: str, value: float | np.ndarray, **kwargs: Any) -> None:
        """Takes one number; JAX's own events pass through here as well and are left alone."""
        parts = event.split("/")
        if len(parts) != 3 or parts[0] != PREFIX:
            return
        mode, name = parts[1:]
        self._entry["step"] = int(kwargs["step"])
        number = float(value)
        self._entry[name if mode == "train" else f"{mode}_{name}"] = (
            int(number) if name in ("tokens", "peak_memory_bytes") else _json_number(number)
        )

    def end_line(self) -> None:
        """Writes what was logged since the last line."""
        if self._entry:
            self._file.write(json.dumps(self._entry) + "\n")
            self._entry = {}

    def flush(self) -> None:
        """Makes sure that the lines survive the process and the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.end_line()
            self.flush()
            self._file.close()


class TensorBoard:
    """A MetricsLogger backend that writes a TensorBoard event file.

    It writes in this thread: SummaryWriter's own dies of a full disk, and then waits for itself.

    Args:
        first_step: what other event files of the folder hold from this step on is not shown.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventsWriter(str(folder / "events"), f".{os.getpid()}")
        self._write(step=first_step, file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def log_scalar(self, event: str, value: float | np.ndarray, **kwargs: Any) -> None:
        if event.startswith(f"{PREFIX}/"):
            summary = self._scalar(event.removeprefix(f"{PREFIX}/"), float(value))
            self._write(step=int(kwargs["step"]), summary=summary)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))


class Metrics:
    """The metrics of a run.

    Args:
        folder: for the files; it is created.
        restored_step: what was logged after it is dropped, for it will be logged again; None drops
            everything that is there.
        tensorboard: whether to write TensorBoard files as well.

    Attributes:
        path: of metrics.jsonl.
        logger: Tunix's, which hands each number to the backends.
    """

    def __init__(self, folder: Path, restored_step: int | None, tensorboard: bool) -> None:
        # Here, for the other backends write the same files without Tunix.
        from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

        self.path = folder / FILE
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            truncate(self.path, restored_step)
            self._lines = JsonLines(self.path)
            self._board = TensorBoard(folder / FOLDER, (restored_step or 0) + 1) if tensorboard else None
        backends: list[Any] = [lambda: self._lines]
        if self._board is not None:
            backends.append(lambda: self._board)
        self.logger = MetricsLogger(
            MetricsLoggerOptions(log_dir=str(folder), backend_kwargs={"custom_backend": backends})
        )

    def log(self, mode: str, step: int, values: Mapping[str, float | None]) -> None:
        """Writes the numbers of one step; None is left out.

        Args:
            mode: "train" or "eval".

        Raises:
            UserError: when they cannot be written.
        """
        with writing(self.path):
            for name, value in values.items():
                if value is not None:
                    self.logger.log(PREFIX, name, value, mode, step)
            self._lines.end_line()

    def flush(self) -> None:
        """Makes sure that what was logged survives the process.

        Raises:
            UserError: when it cannot be written.
        """
        with writing(self.path):
            self._lines.flush()
            if self._board is not None:
                self._board.flush()

    def close(self) -> None:
        """Closes the files. What matters was flushed, and an error of that was raised."""
        try:
            self.logger.close()
        except OSError:
            return


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Within it, a failure to write is an error of the file of metrics."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: the metrics cannot be written: {error.strerror or error}",
            "make room or give the folder's rights, and continue with --resume",
        ) from error


def done_line(step: int, speed: float | None, loss: float | None, eval_loss: float | None, peak: int) -> str:
    """The last line of a run; what is None is left out.

    Args:
        step: that it ended at.
        speed: tokens/s.
        peak: bytes of memory.
    """
    parts = [f"steps={step}"]
    if speed is not None:
        parts.append(f"tokens/s={speed:.0f}")
    if loss is not None:
        parts.append(f"loss={loss:.4f}")
    if eval_loss is not None:
        parts.append(f"eval_loss={eval_loss:.4f}")
    parts.append(f"peak_memory={peak / 2**30:.1f}GiB")
    return "done: " + " ".join(parts)


def _json_number(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def truncate(path: Path, step: int | None) -> None:
    """Drops the lines after a step, and one that a kill cut off.

    Args:
        step: None drops all.
    """
    if not path.exists():
        return
    kept = [line for line, entry in _entries(path) if step is not None and entry["step"] <= step]
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def last(path: Path, name: str) -> float | None:
    """The newest value of a metric in metrics.jsonl."""
    if not path.exists():
        return None
    values = [entry[name] for _, entry in _entries(path) if name in entry]
    return values[-1] if values else None


def _entries(path: Path) -> list[tuple[str, dict[str, Any]]]:
    out = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # cut off
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            out.append((line, entry))
    return out
