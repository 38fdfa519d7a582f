"""A run that is watched: what its folder shows so far, derived figures, and warnings."""

from __future__ import annotations

import itertools
import math
import os
import re
import socket
from collections import deque
from typing import Any

from recipec.compiler.json_value import json_value
from recipec.compiler.report.metrics import Metrics
from recipec.compiler.report.place import Place, Status
from recipec.runtime.addresses import read_by_orbax
from recipec.runtime.checkpoints.manifest import COMMITTED
from recipec.runtime.checkpoints.record import LOCK
from recipec.runtime.metrics.run_state import FILE as STATE
from recipec.runtime.progress import duration

METRICS = "metrics.jsonl"
SEEN = 256
"""Bytes before the read position; if they changed, the file was written anew."""
RECENT, ENOUGH, SPREADS, RATIO = 50, 10, 6.0, 1.5
"""A loss spikes if it exceeds the mean of the RECENT losses before it (at least ENOUGH) by SPREADS standard
deviations, and also exceeds RATIO times that mean. A step's time is the mean of RECENT steps."""
RISES, KEPT = 3, 8
"""Number of consecutive rising evaluations that cause a warning; number of loss warnings that are kept."""
SILENCE, SILENCE_STEPS, DEFAULT_EVERY = 60.0, 5.0, 10
"""A run is silent after SILENCE seconds, and SILENCE_STEPS times the usual time until the next line."""

WAITING, TRAINING = "waiting", "training"
DONE, STOPPED, FAILED, KILLED = "done", "stopped", "failed", "killed"


class WatchedRun:
    """A run in a folder that is read repeatedly."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._record: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._saved: tuple[int, float | None] | None = None
        self._silence: float | None = None
        self._status: Status | None = None
        self._forget()

    def _forget(self) -> None:
        self.metrics = Metrics()
        self.latest: dict[str, float] = {}
        self._wrong: deque[str] = deque(maxlen=KEPT)
        self._recent: deque[float] = deque(maxlen=RECENT)
        self._read, self._rest = 0, b""
        self._before = b""  # the last bytes read: if the file has others there, it was written anew

    def update(self) -> bool:
        """Read what is new; return whether there was anything."""
        before = self.told
        self._record = self._record or self._json(LOCK)
        self._state = self._json(STATE)
        if self._state.get("state") == TRAINING and self._is_gone():
            # The run may have written its last lines after they were read.
            self._state = self._json(STATE)
            if self._state.get("state") == TRAINING:
                self._state["state"] = KILLED
        self._read_lines()
        self._saved = self._newest()
        return before != self.told

    def _read_lines(self) -> None:
        """Read the new lines, or all lines if --resume has truncated and continued the file."""
        status = self.place.status(METRICS)
        size = status.size if status else 0
        self._silence = status.age if status and self.metrics.lines else None
        if status == self._status:
            return
        self._status = status
        new = self.place.read(METRICS, self._read - len(self._before), size) if size >= self._read else b""
        if not new.startswith(self._before):
            self._forget()
            new = self.place.read(METRICS, 0, size)
        fresh, self._before = new[len(self._before) :], new[-SEEN:]
        self._read += len(fresh)
        *lines, self._rest = (self._rest + fresh).split(b"\n")
        for line in lines:
            if (entry := self.metrics.take(line)) is not None and "loss" in entry:
                self.latest = entry
                self._look(int(entry["step"]), entry["loss"], entry.get("grad_norm", 0.0))
        self._silence = status.age if status and self.metrics.lines else None

    def _look(self, step: int, loss: float, norm: float) -> None:
        """Check a step's loss and gradient norm for problems."""
        for name, value in (("loss", loss), ("gradient's norm", norm)):
            if not math.isfinite(value):
                self._wrong.append(f"step {step:,}: the {name} is {value}")
        if not math.isfinite(loss):
            return
        mean = sum(self._recent) / max(1, len(self._recent))
        if len(self._recent) >= ENOUGH and loss > RATIO * mean:
            spread = math.sqrt(sum((one - mean) ** 2 for one in self._recent) / len(self._recent))
            if loss > mean + SPREADS * spread:
                self._wrong.append(f"step {step:,}: the loss jumped to {loss:.4g}, from {mean:.4g}")
        self._recent.append(loss)

    @property
    def step(self) -> int:
        """The newest step of any line, 0 without one."""
        return max((next(reversed(values)) for values in self.metrics.values.values()), default=0)

    @property
    def evals(self) -> list[tuple[int, float]]:
        """Step and loss of each evaluation."""
        return list(self.metrics.values.get("eval_loss", {}).items())

    @property
    def step_seconds(self) -> float | None:
        """The mean of the latest steps, without the first, which compiles, unless it is the only one."""
        every = self.metrics.values.get("step_seconds", {})
        times = list(itertools.islice(reversed(every.values()), RECENT))
        if len(times) == len(every) > 1:
            times.pop()
        times = [value for value in times if math.isfinite(value)]
        return sum(times) / len(times) if times else None

    @property
    def told(self) -> tuple[object, ...]:
        """The values whose change is worth a new line; times are not among them."""
        saved = None if self._saved is None else self._saved[0]
        return (self.outcome, self.reason, self.step, len(self.evals), saved)

    @property
    def name(self) -> str:
        """The recipe's name, or the folder's until the run's record exists."""
        return clean(self._record.get("name") or self.place.name.rpartition("/")[2])

    @property
    def about(self) -> str:
        """The model, what is trained in it, and the hardware; "" while the record does not exist."""
        if self._recorded("model") is None:
            return ""
        rank, objective = self._recorded("lora", "rank"), self._recorded("train", "objective")
        weights = "some weights" if self._recorded("train", "only") else "all weights"
        what = weights if rank is None else f"LoRA {rank}"
        where = self._recorded("mesh", "topology") or self._recorded("mesh", "accelerator")
        parts = [self._recorded("model", "id"), what, None if objective == "sft" else objective, where]
        return ", ".join(clean(part) for part in parts if part)

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run, None if not known."""
        return _positive(self._state.get("total")) or _positive(self._recorded("train", "steps"))

    @property
    def until(self) -> int | None:
        """The step after which the run's process stops."""
        return _positive(self._state.get("until")) or self.total

    @property
    def outcome(self) -> str:
        """One of the states above. For a run of an earlier version it is derived from the steps alone."""
        state = self._state.get("state")
        if state in (TRAINING, DONE, STOPPED, FAILED, KILLED):
            return str(state)
        if self.total is not None and self.step >= self.total:
            return DONE
        return TRAINING if self.metrics.lines else WAITING

    @property
    def ended(self) -> bool:
        return self.outcome not in (WAITING, TRAINING)

    @property
    def well(self) -> bool:
        """Whether it is running, or ended as requested."""
        return self.outcome in (WAITING, TRAINING, DONE) or self.reason.startswith("--steps")

    @property
    def reason(self) -> str:
        """Why it stopped or failed; "" if no reason was recorded."""
        return clean(self._state.get("reason") or "")

    @property
    def warnings(self) -> list[str]:
        """Warnings about the run, the newest last."""
        found, last = list(self._wrong), self.evals[-(RISES + 1) :]
        if len(last) > RISES and all(a[1] < b[1] for a, b in itertools.pairwise(last)):
            (first, low), (_, high) = last[0], last[-1]
            found.append(f"eval_loss has risen since step {first:,}, from {low:.4g} to {high:.4g}")
        if self.outcome == TRAINING and self._silence is not None:
            every = _positive(self._recorded("train", "log", "every")) or DEFAULT_EVERY
            pace = every * (self.step_seconds or 0.0)
            if self._silence > max(SILENCE, SILENCE_STEPS * pace):
                usual = f"; {every} steps take {duration(pace)}" if pace else ""
                found.append(f"no line for {duration(self._silence)}{usual}")
        if self.outcome == KILLED:
            found.append(
                f"its process ({self._state.get('pid')}) ended without an error message; "
                "continue with --resume"
            )
        return found

    def facts(self) -> dict[str, Any]:
        """Return the content of `--json`: units as in metrics.jsonl, times in seconds, None if unknown."""
        evals, each, until = self.evals, self.step_seconds, self.until
        going = self.outcome == TRAINING and each is not None and until is not None
        names = ("loss", "learning_rate", "grad_norm", "rewards_accuracy", "tokens_per_second")
        return {
            "name": self.name,
            "directory": self.place.name,
            "state": self.outcome,
            "reason": self.reason or None,
            "step": self.step,
            "total": self.total,
            "until": until,
            **{name: self.latest.get(name) for name in (*names, "peak_memory_bytes")},
            "eval_loss": evals[-1][1] if evals else None,
            "eval_step": evals[-1][0] if evals else None,
            "step_seconds": each,
            "seconds_left": (each or 0.0) * max(0, (until or 0) - self.step) if going else None,
            "checkpoint": self._saved and self._saved[0],
            "checkpoint_seconds": self._saved and self._saved[1],
            "silent_seconds": self._silence,
            "warnings": self.warnings,
        }

    def _recorded(self, *path: str) -> Any:
        """Return a value of the resolved recipe, None if it does not exist."""
        found = self._record.get("recipe")
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def _json(self, file: str) -> dict[str, Any]:
        """Read a JSON object; empty if the file does not exist or is not complete yet."""
        found = json_value(self.place.read(file, 0, 1 << 24))
        return found if isinstance(found, dict) else {}

    def _newest(self) -> tuple[int, float | None] | None:
        """Return the newest checkpoint and its age; folders are named by step, or as in transformers."""
        matches = [re.fullmatch(r"(?:checkpoint-)?(\d{1,12})", name) for name in self.place.folders()]
        for step, folder in sorted(((int(match[1]), match[0]) for match in matches if match), reverse=True):
            # In a bucket, a step's folder has its final name before it is complete, and folders have no time.
            marked = folder.isdigit() and read_by_orbax(self.place.name)
            status = self.place.status(f"{folder}/{COMMITTED}" if marked else folder)
            if status is not None or not marked:
                return step, status.age if status else None
        return None

    def _is_gone(self) -> bool:
        """Return whether the training process has ended, as far as this machine can tell."""
        pid = self._state.get("pid")
        if self._state.get("host") == socket.gethostname() and isinstance(pid, int) and not self.place.system:
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return True
            except (OSError, OverflowError):
                return False
        return False


def clean(value: object) -> str:
    """Return a text from a file without terminal control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and value > 0 else None
