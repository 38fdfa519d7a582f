"""The numbers of metrics.jsonl, as they come in."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from compiler.json_value import json_value
from compiler.watch.findings import Losses

RECENT = 50
"""Steps over which a pace is averaged."""


@dataclass
class Series:
    """What the lines of a run's metrics have said so far.

    Attributes:
        steps, losses: of the training lines, in their order; a loss that is not finite is NaN.
        evals: step and loss of each evaluation.
        latest: the newest training line.
        seconds, speeds: of the latest steps: seconds each, and tokens a second.
        found: what looks wrong about the losses.
    """

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    evals: list[tuple[int, float]] = field(default_factory=list)
    latest: dict[str, Any] = field(default_factory=dict)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    speeds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    found: Losses = field(default_factory=Losses)

    @property
    def step(self) -> int:
        """The newest step of any line, 0 without one."""
        return max(self.steps[-1] if self.steps else 0, self.evals[-1][0] if self.evals else 0)

    @property
    def empty(self) -> bool:
        return not self.steps and not self.evals

    @property
    def step_seconds(self) -> float | None:
        """Of the latest steps, on average; the first, which compiles, counts only while it is alone."""
        times = list(self.seconds)
        if len(times) > 1 and len(times) == len(self.steps):
            times = times[1:]
        return sum(times) / len(times) if times else None

    @property
    def speed(self) -> float | None:
        """Tokens a second of the newest step."""
        return self.speeds[-1] if self.speeds else None

    def add(self, lines: Iterable[bytes]) -> None:
        """Takes lines; what is not one of metrics.jsonl (one that a kill cut off) is passed over."""
        for line in lines:
            entry = json_value(line)
            if isinstance(entry, dict) and type(entry.get("step")) is int:
                self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        step = entry["step"]
        if "eval_loss" in entry:
            loss = number(entry["eval_loss"])
            self.evals.append((step, math.nan if loss is None else loss))
            self.found.evaluation(self.evals)
        if "loss" not in entry:
            return
        loss = number(entry["loss"])
        self.steps.append(step)
        self.losses.append(loss if loss is not None and math.isfinite(loss) else math.nan)
        self.latest = entry
        self.found.step(step, loss, number(entry.get("grad_norm")))
        for name, into in (("step_seconds", self.seconds), ("tokens_per_second", self.speeds)):
            value = number(entry.get(name))
            if value is not None and math.isfinite(value):
                into.append(value)


def number(value: Any) -> float | None:
    """A number of metrics.jsonl, where "NaN" and "Infinity" stand for those; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None
