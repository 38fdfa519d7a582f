"""A run's numbers as TensorBoard reads them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

FOLDER = "tensorboard"


class TensorBoard:
    """A backend of runtime.metrics that writes a TensorBoard event file.

    It writes in this thread: SummaryWriter's own dies of a full disk, and then waits for itself.

    Args:
        first_step: what other event files of the folder hold from this step on is not shown.
        prefix: of the names of a run's numbers.
    """

    def __init__(self, folder: Path, first_step: int, prefix: str) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, which begin with the second.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._closed, self._prefix = False, f"{prefix}/"
        self._write(step=first_step, file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def log_scalar(self, event: str, value: float | np.ndarray, **kwargs: Any) -> None:
        if event.startswith(self._prefix) and not self._closed:
            summary = self._scalar(event.removeprefix(self._prefix), float(value))
            self._write(step=int(kwargs["step"]), summary=summary)

    def end_line(self) -> None:
        """Shows what was logged to whoever looks at the folder."""
        self._writer.flush()

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._closed = True
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))
