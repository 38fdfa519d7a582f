"""Write a run's metrics: metrics.jsonl, TensorBoard, and the services of services.py.

metrics.jsonl has one object per line. Training: step, loss, learning_rate, grad_norm (of the step's
accumulated gradient, before clipping), tokens (real tokens of the step), tokens_per_second, step_seconds,
peak_memory_bytes. Preferences add rewards_chosen, rewards_rejected, rewards_margin and rewards_accuracy
(unpaired ones kl instead of the last). Experts add expert_share_min and expert_share_max (share of a layer's
tokens that one expert gets) and, with the load-balancing loss, aux_loss (before its weight). Rewards add
reward, reward_std, reward/NAME, frac_reward_zero_std, completion_length, truncated_share, ratio, clip_low,
clip_high, kl, entropy, and the seconds of rollouts, rewards and updates. A student's own answers add
own_answers, the lengths and the seconds of those. Evaluation:
step, eval_loss, and with several sources the loss of each as eval/NAME; with rewards eval/reward,
eval/reward_std, eval/reward/NAME and the like, and the reward of each source as eval/NAME/reward. JSON has
no non-finite numbers, so these are written as "NaN", "Infinity" or "-Infinity".
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..addresses import path_of, reached, write_whole
from ..errors import UserError

if TYPE_CHECKING:
    from .services import Service

FILE = "metrics.jsonl"
GENERATIONS = "generations.jsonl"
"""The answers to train.generations, an object per line: step, prompt (a text or messages, as in its file),
answer, tokens (number in the answer), ended (whether a token that ends answers came). Those to held-out
prompts of a run with rewards have reward and rewards (by function) too."""


COMPLETIONS = "completions.jsonl"
"""The first completions of a batch that a policy is trained on, an object per line: step (the first one on
the batch), prompt, completion, tokens, ended, reward, rewards (by function), advantage."""


class JsonLines:
    """Write a line for each step and mode."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def log(self, mode: str, step: int, values: Mapping[str, float]) -> None:
        entry: dict[str, Any] = {"step": step}
        for name, value in values.items():
            whole = name in ("tokens", "peak_memory_bytes")
            if mode != "train":
                name = "eval_loss" if name == "loss" else f"{EVAL}{name}"
            entry[name] = int(value) if whole else _json_number(float(value))
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()  # so that others can follow the file; flush() makes it durable

    def flush(self) -> None:
        """Make the lines survive the process and the machine."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
            self._file.close()


def nowhere(path: Path) -> None:
    """Do nothing: with local checkpoints a run's files are already in place."""


class Metrics:
    """The metrics of a run.

    Args:
        folder: folder for the files; it is created.
        restored_step: later lines are dropped, because these steps will be logged again; None drops
            all lines.
        tensorboard: whether to write TensorBoard files as well.
        services: the run in each service.
        publish: copies metrics.jsonl to the checkpoints if they are elsewhere.

    Attributes:
        path: path of metrics.jsonl.
        early: why the run ended before its last step, or None.
    """

    early: str | None = None

    def __init__(
        self,
        folder: Path,
        restored_step: int | None,
        tensorboard: bool,
        services: Sequence[Service] = (),
        publish: Callable[[Path], None] = nowhere,
    ) -> None:
        self.path = folder / FILE
        self._services, self._publish = services, publish
        with writing(self.path):
            folder.mkdir(parents=True, exist_ok=True)
            truncate(self.path, restored_step)
            truncate(folder / GENERATIONS, restored_step)
            truncate(folder / COMPLETIONS, restored_step)
            self._backends: list[Any] = [JsonLines(self.path)]
            if tensorboard:
                first = 0 if restored_step is None else restored_step + 1
                self._backends.append(TensorBoard(folder / TENSORBOARD_FOLDER, first))
        self._backends += services

    def log(self, mode: str, step: int, values: Mapping[str, float | None]) -> None:
        """Write the numbers of one step; None values are left out.

        Args:
            mode: "train" or "eval".

        Raises:
            UserError: when they cannot be written.
        """
        known = {name: value for name, value in values.items() if value is not None}
        with writing(self.path):
            for backend in self._backends if known else ():
                backend.log(mode, step, known)

    def samples(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Write answers of a step to generations.jsonl.

        Raises:
            UserError: when they cannot be written.
        """
        self._append(GENERATIONS, step, answers)

    def completions(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Write completions of a step to completions.jsonl.

        Raises:
            UserError: when they cannot be written.
        """
        self._append(COMPLETIONS, step, completions)

    def _append(self, name: str, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        path = self.path.with_name(name)
        with writing(path), path.open("a", encoding="utf-8") as file:
            for answer in answers:
                file.write(json.dumps({"step": step, **answer}, ensure_ascii=False) + "\n")
        self._publish(path)

    def flush(self) -> None:
        """Make the logged metrics survive the process.

        Raises:
            UserError: when it cannot be written.
        """
        with writing(self.path):
            for backend in self._backends:
                backend.flush()
        self._publish(self.path)

    def ends(self, status: int, stopped: bool = False) -> None:
        """Record, before the metrics are closed, how the run ended; without this call it counts as failed.

        Args:
            status: the script's exit status.
            stopped: whether a signal stopped the run, which may continue later.
        """
        for service in self._services:
            service.status, service.stopped = status, stopped

    def close(self) -> None:
        """Close the files. `flush` has already written important data and raised its errors."""
        try:
            with suppress(OSError):
                for backend in self._backends:
                    if backend not in self._services:
                        backend.close()
        finally:
            for service in self._services:
                service.close()


class Nowhere:
    """The metrics of a process that writes none, because process 0 writes them.

    Attributes:
        path: process 0's path of metrics.jsonl.
        early: as in `Metrics`.
    """

    early: str | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, mode: str, step: int, values: Mapping[str, float | None]) -> None:
        """Do nothing."""

    def samples(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def completions(self, step: int, completions: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write within the block into an error that names the metrics file."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{path}: the metrics cannot be written: {error.strerror or error}",
            "free disk space or allow writing to the folder, and continue with --resume",
        ) from error


EVAL = "eval/"
"""The prefix of a source's name in metrics.jsonl and in TensorBoard."""


@dataclass(frozen=True)
class Criterion:
    """A number of evaluations by which a step is the best one.

    Attributes:
        key: its name among an evaluation's numbers.
        name: its name in metrics.jsonl.
        title: in a sentence.
        best: "lowest" or "highest".
    """

    key: str
    name: str
    title: str
    best: str

    def cost(self, value: float) -> float:
        """Return a number that is the lowest for the best value."""
        return value if self.best == "lowest" else -value


LOSS = Criterion("loss", "eval_loss", "evaluation loss", "lowest")
REWARD = Criterion("reward", f"{EVAL}reward", "evaluation reward", "highest")
CRITERIA = (LOSS, REWARD)
"""The criteria, of which a run has at most one."""


def done_line(
    step: int,
    speed: float | None,
    loss: float | None,
    eval_loss: float | None,
    peak: int,
    early: str | None = None,
    eval_reward: float | None = None,
) -> str:
    """Return the last line of a run; None values are left out.

    Args:
        step: the step at which it ended.
        speed: in tokens/s.
        peak: in bytes of memory.
        early: why it ended before its last step.
        eval_reward: of held-out prompts.
    """
    parts = [f"steps={step}"]
    if speed is not None:
        parts.append(f"tokens/s={speed:.0f}")
    if loss is not None:
        parts.append(f"loss={loss:.4f}")
    if eval_loss is not None:
        parts.append(f"eval_loss={eval_loss:.4f}")
    if eval_reward is not None:
        parts.append(f"{REWARD.name}={eval_reward:.4f}")
    parts.append(f"peak_memory={peak / 2**30:.1f}GiB")
    return "done: " + " ".join(parts) + (f" ({early})" if early else "")


def _json_number(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def truncate(path: Path, step: int | None) -> None:
    """Drop the lines after a step, and a line that a kill cut off.

    Args:
        step: None drops all lines.
    """
    if not path.exists():
        return
    kept = [line for line, entry in read_entries(path) if step is not None and entry["step"] <= step]
    write_whole(path.parent, path.name, "".join(f"{line}\n" for line in kept).encode())


def last(path: Path, name: str) -> float | None:
    """Return the newest value of a metric in metrics.jsonl."""
    values = [float(entry[name]) for _, entry in read_entries(path) if name in entry]
    return values[-1] if values else None


def read_entries(path: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return the complete lines of metrics.jsonl, as text and as values; empty if there is no file."""
    out = []
    text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
    for line in text.split("\n"):  # an answer may hold characters at which splitlines() would cut
        try:
            entry = json.loads(line)
        except (ValueError, RecursionError):
            continue  # a cut-off line
        if isinstance(entry, dict) and isinstance(entry.get("step"), int):
            out.append((line, entry))
    return out


TENSORBOARD_FOLDER = "tensorboard"


class TensorBoard:
    """Write a TensorBoard event file.

    It writes in this thread: a full disk ends SummaryWriter's own thread, which then waits for itself.

    Args:
        first_step: TensorBoard hides data of the folder's other event files from this step on.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        self._event, self._scalar = Event, scalar
        folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files in the order of their names, which begin with the second.
        self._writer = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._write(step=first_step, file_version="brain.Event:2")
        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def log(self, mode: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._write(step=step, summary=self._scalar(f"{mode}/{name}", float(value)))
        self._writer.flush()  # shows them to readers of the folder

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()

    def _write(self, **fields: Any) -> None:
        self._writer.write_event(self._event(wall_time=time.time(), **fields))


def upload(path: Path, directory: str) -> None:
    """Copy a file, if it exists, into a directory at an address; print a note if that fails.

    By then the run is complete and the file is on this machine, so a failed copy is not a failure.
    """
    try:
        _put(path, directory)
    except (UserError, OSError) as error:
        print(f"note: {error}; {path} is complete", file=sys.stderr)


def publisher(directory: str) -> Callable[[Path], None]:
    """Return a function that copies a file to a directory at an address during the run.

    The copy is for watching, and in case the machine is lost. The next copy makes up for a failed one.
    """

    def publish(path: Path) -> None:
        try:
            _put(path, directory)
        except (UserError, OSError):
            return

    return publish


def _put(path: Path, directory: str) -> None:
    if path.exists():
        write_whole(directory, path.name, path.read_bytes())


def download(path: Path, directory: str) -> None:
    """Fetch the metrics of a run that another machine began, if they go further than the local ones.

    Args:
        path: local path of metrics.jsonl, or another file of steps.
        directory: address of the checkpoint directory.

    Raises:
        UserError: when they cannot be read: the local ones would overwrite them.
    """
    there = path_of(directory) / path.name
    with reached(directory):
        if not there.exists():
            return
        content = there.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_bytes(content)
    if _last_step(temporary) > _last_step(path):
        temporary.replace(path)
    else:
        temporary.unlink()


def _last_step(path: Path) -> int:
    return max((entry["step"] for _, entry in read_entries(path)), default=-1)
