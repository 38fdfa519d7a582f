"""Where a run's numbers go: metrics.jsonl and TensorBoard, behind Tunix's MetricsLogger.

metrics.jsonl has one object a line. Training: step, loss, learning_rate, grad_norm (of the step's
accumulated gradient, before clipping), tokens (real ones of the step), tokens_per_second, step_seconds,
peak_memory_bytes. Evaluation: step, eval_loss.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from tunix.sft.metrics_logger import MetricsLogger, MetricsLoggerOptions

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
            int(number) if name in ("tokens", "peak_memory_bytes") else number
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
    """A MetricsLogger backend that writes TensorBoard event files."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboardX import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=first_step)

    def log_scalar(self, event: str, value: float | np.ndarray, **kwargs: Any) -> None:
        if event.startswith(f"{PREFIX}/"):
            self._writer.add_scalar(event.removeprefix(f"{PREFIX}/"), float(value), int(kwargs["step"]))

    def close(self) -> None:
        self._writer.close()


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
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / FILE
        truncate(self.path, restored_step)
        self._lines = JsonLines(self.path)
        backends: list[Any] = [lambda: self._lines]
        if tensorboard:
            backends.append(lambda: TensorBoard(folder / FOLDER, (restored_step or 0) + 1))
        self.logger = MetricsLogger(
            MetricsLoggerOptions(log_dir=str(folder), backend_kwargs={"custom_backend": backends})
        )

    def log(self, mode: str, step: int, values: Mapping[str, float | None]) -> None:
        """Writes the numbers of one step; None is left out.

        Args:
            mode: "train" or "eval".
        """
        for name, value in values.items():
            if value is not None:
                self.logger.log(PREFIX, name, value, mode, step)
        self._lines.end_line()

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self.logger.close()


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
