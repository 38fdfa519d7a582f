"""A run that is watched: what its folder says of it, and what follows from that."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from typing import Any

from compiler.json_value import json_value
from compiler.watch.places import Place, age
from compiler.watch.series import Series, number
from compiler.watch.tail import Tail
from runtime.addresses import read_by_orbax
from runtime.manifest import COMMITTED
from runtime.progress import duration
from runtime.record import LOCK
from runtime.run_state import FILE as STATE

METRICS = "metrics.jsonl"
SMALL = 1 << 24
"""Bytes of a JSON file that are read at most."""

SILENCE, SILENCE_STEPS = 60.0, 5.0
"""A run is said to be silent after so many seconds, and so many times what its next lines should take."""
DEFAULT_EVERY = 10
"""Steps between lines of a run whose record does not tell."""

WAITING, TRAINING = "waiting", "training"
DONE, STOPPED, FAILED, KILLED = "done", "stopped", "failed", "killed"
ENDED = (DONE, STOPPED, FAILED, KILLED)


@dataclass(frozen=True)
class Saved:
    """The newest checkpoint.

    Attributes:
        seconds: since it was saved; None where the place does not say.
    """

    step: int
    seconds: float | None


class Run:
    """A run by its folder, looked at again and again.

    Attributes:
        place: the folder.
        series: the numbers of its metrics.
        restarted: how often what had been read was written anew, as --resume does.
    """

    def __init__(self, place: Place) -> None:
        self.place = place
        self.series = Series()
        self.saved: Saved | None = None
        self.restarted = 0
        self._tail = Tail(place, METRICS)
        self._record: dict[str, Any] = {}
        self._state: dict[str, Any] = {}
        self._alive = True

    def update(self) -> bool:
        """Reads what is new; whether there was anything.

        Raises:
            UserError: when the place cannot be read.
        """
        before = self.told
        if not self._record:
            self._record = self._json(LOCK)
        self._state = self._json(STATE)
        if self._tail.look():
            self.series = Series()
            self.restarted += 1
        self.series.add(self._tail.lines())
        self.saved = self._newest()
        self._alive = self._is_alive()
        return before != self.told

    @property
    def told(self) -> tuple[object, ...]:
        """What a line about it would tell anew, but for times."""
        saved = None if self.saved is None else self.saved.step
        return (self.outcome, self.reason, self.series.step, len(self.series.evals), saved)

    @property
    def name(self) -> str:
        """The recipe's, or the folder's until its record is there."""
        return clean(self._record.get("name") or self.place.name.rstrip("/").rpartition("/")[2])

    @property
    def about(self) -> str:
        """The model, what is trained of it, and on what; "" while its record is not there."""
        if self._recorded("model") is None:
            return ""
        rank, objective = self._recorded("lora", "rank"), self._recorded("train", "objective")
        what = "all weights" if rank is None else f"LoRA {rank}"
        where = self._recorded("mesh", "topology") or self._recorded("mesh", "accelerator")
        parts = [self._recorded("model", "id"), what, None if objective == "sft" else objective, where]
        return ", ".join(clean(part) for part in parts if part)

    @property
    def total(self) -> int | None:
        """Optimizer steps of the whole run, None where nothing tells."""
        steps = self._state.get("total")
        if steps is None:
            steps = self._recorded("train", "steps")
        return steps if isinstance(steps, int) and steps > 0 else None

    @property
    def until(self) -> int | None:
        """The step after which its process stops."""
        steps = self._state.get("until")
        return steps if isinstance(steps, int) and steps > 0 else self.total

    @property
    def outcome(self) -> str:
        """One of the states above."""
        state = self._state.get("state")
        if state in (DONE, STOPPED, FAILED):
            return str(state)
        if state == TRAINING:
            return TRAINING if self._alive else KILLED
        # A run of an earlier version tells by its steps alone.
        if self.total is not None and self.series.step >= self.total:
            return DONE
        return WAITING if self.series.empty else TRAINING

    @property
    def ended(self) -> bool:
        return self.outcome in ENDED

    @property
    def well(self) -> bool:
        """Whether it goes, or ended as it was asked to."""
        return self.outcome in (WAITING, TRAINING, DONE) or self.reason.startswith("--steps")

    @property
    def reason(self) -> str:
        """Why it stopped or failed, "" where nothing is said."""
        return clean(self._state.get("reason") or "")

    @property
    def seconds_left(self) -> float | None:
        """Until its process stops, at the pace of the latest steps."""
        each, until = self.series.step_seconds, self.until
        if each is None or until is None or self.outcome != TRAINING:
            return None
        return each * max(0, until - self.series.step)

    @property
    def silence(self) -> float | None:
        """Seconds since the last line, None without one."""
        return None if self.series.empty else age(self._tail.status)

    @property
    def warnings(self) -> list[str]:
        """What looks wrong, the newest last."""
        found = list(self.series.found.found)
        if self.series.found.rising:
            found.append(self.series.found.rising)
        silence, each = self.silence, self.series.step_seconds
        if self.outcome == TRAINING and silence is not None:
            every = self._every()
            if silence > max(SILENCE, SILENCE_STEPS * every * (each or 0.0)):
                pace = f"; {every} steps take {duration(every * each)}" if each else ""
                found.append(f"no line for {duration(silence)}{pace}")
        if self.outcome == KILLED:
            found.append(f"its process ({self._state.get('pid')}) is gone without a word: --resume goes on")
        return found

    def number(self, name: str) -> float | None:
        """A number of the newest training line."""
        return number(self.series.latest.get(name))

    def _every(self) -> int:
        """Steps whose lines are written together."""
        every = self._recorded("train", "log", "every")
        return every if isinstance(every, int) and every > 0 else DEFAULT_EVERY

    def _recorded(self, *path: str) -> Any:
        """A value of the resolved recipe, None where there is none."""
        found = self._record.get("recipe")
        for key in path:
            found = found.get(key) if isinstance(found, dict) else None
        return found

    def _json(self, file: str) -> dict[str, Any]:
        """A JSON object; nothing where there is none, or not yet a whole one."""
        if self.place.status(file) is None:
            return {}
        found = json_value(self.place.read(file, 0, SMALL))
        return found if isinstance(found, dict) else {}

    def _newest(self) -> Saved | None:
        """The newest checkpoint: a folder named by its step, or by transformers' "checkpoint-STEP"."""
        matches = map(_STEP.fullmatch, self.place.folders())
        for step, folder in sorted(((int(match[1]), match[0]) for match in matches if match), reverse=True):
            # In a bucket a step has its name before it is whole, and a folder has no time.
            marked = folder.isdigit() and read_by_orbax(self.place.name)
            status = self.place.status(f"{folder}/{COMMITTED}" if marked else folder)
            if status is not None or not marked:
                return Saved(step, age(status))
        return None

    def _is_alive(self) -> bool:
        """Whether the process that trains still is, as far as this machine can tell."""
        pid = self._state.get("pid")
        if self._state.get("host") != socket.gethostname() or not isinstance(pid, int) or not self.place.here:
            return True
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            # Its last words may have been written after they were read.
            self._state = self._json(STATE)
            return self._state.get("state") != TRAINING
        except (OSError, OverflowError):
            return True
        return True


def clean(value: object) -> str:
    """A text of a file, without what a terminal would act on."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value))


_STEP = re.compile(r"(?:checkpoint-)?(\d{1,12})")
