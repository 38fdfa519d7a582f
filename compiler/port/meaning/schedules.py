"""Schedules of the learning rate, as the recipe's `train.schedule`.

The recipe's schedules are transformers' get_*_schedule_with_warmup, whose decay may end above zero. Some of
the others are among them (a polynomial of power 1 is linear); the rest get the nearest, and a note on what
is lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Schedule:
    """What a name of a schedule means here.

    Attributes:
        name: of the recipe's schedule; None for a name that no one knows.
        final_ratio: the last rate, as a share of the peak.
        note: how it differs, "" where each step's rate is the same.
        warms_up: whether a warm-up that is given beside it counts; transformers' `constant` has none.
    """

    name: str | None
    final_ratio: float = 0.0
    note: str = ""
    warms_up: bool = True


@dataclass(frozen=True)
class Warmup:
    """The warm-up of a run: one of the two, or neither.

    Attributes:
        steps: of the optimizer.
        ratio: share of all steps, rounded up.
        note: what becomes of a value that is not taken at its word, "" otherwise.
    """

    steps: int | None = None
    ratio: float | None = None
    note: str = ""

    def sets(self) -> dict[str, Any]:
        """The recipe's values; none for no warm-up."""
        if self.ratio:
            return {"train.schedule.warmup_ratio": self.ratio}
        return {"train.schedule.warmup_steps": self.steps} if self.steps else {}


_CONSTANT = "the rate stays at its peak here: "


def translate(
    name: str, kwargs: Mapping[str, Any] | None = None, learning_rate: float | None = None
) -> Schedule:
    """The recipe's schedule for one of transformers' (`lr_scheduler_type`) or torchtune's.

    Args:
        name: "cosine", "cosine_with_min_lr", ...
        kwargs: `lr_scheduler_kwargs`.
        learning_rate: the peak, which the shares of `min_lr` and `lr_end` need.
    """
    given = dict(kwargs or {})
    if name == "linear":
        return Schedule("linear")
    if name == "constant":
        return Schedule("constant", warms_up=False)
    if name == "constant_with_warmup":
        return Schedule("constant")
    if name in ("cosine", "cosine_with_min_lr", "cosine_warmup_with_min_lr", "cosine_with_restarts"):
        return _cosine(name, given, learning_rate)
    if name == "polynomial":
        return _polynomial(given, learning_rate)
    if name == "warmup_stable_decay":
        return Schedule("constant", note=_CONSTANT + "the decay at the end of the run is missing")
    if name == "inverse_sqrt":
        return Schedule("constant", note=_CONSTANT + "the slow decay with the root of the step is missing")
    if name in ("reduce_lr_on_plateau", "greedy"):
        return Schedule(
            "constant", note=_CONSTANT + "it does not follow the evaluation's loss", warms_up=False
        )
    return Schedule(None)


def _cosine(name: str, given: Mapping[str, Any], learning_rate: float | None) -> Schedule:
    final = 0.0
    if "min_lr" in name or "min_lr" in given or "min_lr_rate" in given:
        final = _share(given.get("min_lr_rate"), given.get("min_lr"), learning_rate)
    notes = []
    whole = 1 if name == "cosine_with_restarts" else 0.5
    cycles = given.get("num_cycles", whole)
    if cycles != whole:
        notes.append(f"one half wave here, not num_cycles: {cycles}")
    if name == "cosine_warmup_with_min_lr":
        notes.append("the warm-up starts from zero here, one step below or at warmup_lr_rate there")
    return Schedule("cosine", final, "; ".join(notes))


def _polynomial(given: Mapping[str, Any], learning_rate: float | None) -> Schedule:
    power = given.get("power", 1.0)
    final = _share(None, given.get("lr_end", 1e-7), learning_rate)
    note = "" if power == 1.0 else f"the decay is linear here, not of the power {power}"
    return Schedule("linear", final, note)


def _share(ratio: Any, rate: Any, learning_rate: float | None) -> float:
    if ratio is not None:
        return float(ratio)
    return float(rate) / learning_rate if rate is not None and learning_rate else 0.0


def warmup(steps: float | None = None, ratio: float | None = None) -> Warmup:
    """The warm-up of transformers' TrainingArguments.

    `warmup_ratio` wins over `warmup_steps`; whichever holds is a share of all steps below 1, and a number of
    steps from 1 on (a ratio of 1.0 is one step).
    """
    held = steps if ratio is None else ratio
    if not held:
        return Warmup()
    if held < 1:
        return Warmup(ratio=float(held))
    note = "" if int(held) == held and ratio is None else f"taken as {int(held)} steps, as transformers does"
    return Warmup(steps=int(held), note=note)
