"""Continue a run with another length: at its constant learning rate, or with a new schedule after a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import UserError

LENGTH = ("train.steps", "train.epochs")
"""Keys of a recipe that set a run's length."""

WARMUP = ("train.schedule.warmup_steps", "train.schedule.warmup_ratio")

RATES = ("train.schedule", "train.optimizer.learning_rate", "train.continue_from")
"""Keys that set the learning rate of each step, together with the length."""


@dataclass(frozen=True)
class Longer:
    """A continued run whose recipe has another length or schedule than the run's record.

    Attributes:
        began, now: the `train` section of the record, and of the recipe.
    """

    began: Mapping[str, Any]
    now: Mapping[str, Any]

    @property
    def renews(self) -> bool:
        """Return whether a new schedule begins (train.continue_from)."""
        return self.now.get("continue_from") != self.began.get("continue_from")

    def ended(self, steps_per_epoch: int | None) -> int:
        """Return the step at which the run was to end."""
        steps: int | None = self.began.get("steps")
        return steps or math.ceil((self.began.get("epochs") or 1) * (steps_per_epoch or 0))


def longer_run(
    directory: str,
    changed: Sequence[str],
    began: Mapping[str, Any],
    now: Mapping[str, Any],
    newest: int | None,
) -> Longer:
    """Return how a run continues after a change of its length or of its learning rates.

    Args:
        changed: the differences, each beginning with its path in the recipe.
        began, now: the `train` section of the record, and of the recipe.
        newest: step of the newest checkpoint, None if there is none.

    Raises:
        UserError: the steps that are done would have had other learning rates.
    """
    longer = Longer(began, now)
    if longer.renews and now.get("continue_from") is not None:
        return longer
    shape = began.get("schedule", {}).get("name")
    other = [line for line in changed if line.partition(" ")[0] not in (*LENGTH, *WARMUP)]
    if not other and shape == "constant":
        return longer
    why = "these keys set the learning rates of the steps that are done"
    if not other:
        why = f"a {shape} schedule ends with the run, so the steps that are done had other learning rates"
    if newest is None:
        raise UserError(
            f"{directory} holds the record of a run of another length or schedule, and no checkpoint: "
            f"{'; '.join(changed)}",
            "start without --resume; or continue with the artifact that started the run",
        )
    raise UserError(
        f"{directory} holds a run of another length or schedule: {'; '.join(changed)}; {why}",
        f"train: {{continue_from: {newest}}} in the recipe begins a new schedule after that step and "
        "keeps the optimizer's state; or continue with the artifact that started the run",
    )


def check_length(
    directory: str,
    step: int | None,
    total: int,
    steps_per_epoch: int | None,
    now: int | None,
    longer: Longer | None,
) -> str | None:
    """Check a run's length and its new schedule against the checkpoint that it continues from.

    Args:
        step: the checkpoint's step, None for none.
        total: the step that the run ends at.
        now: the recipe's train.continue_from.

    Returns:
        A note about a changed length or schedule.

    Raises:
        UserError: they do not fit.
    """
    if now is not None:
        newest = "there is no checkpoint" if step is None else f"the newest checkpoint is of step {step}"
        asked = f"train.continue_from begins a new schedule after step {now}, and in {directory} {newest}"
        if step is None or step < now:
            raise UserError(
                asked,
                "--resume with the --output of the run that has this checkpoint"
                + ("" if step is None else f"; or continue_from: {step}"),
            )
        if step > now and longer is not None and longer.renews:
            raise UserError(asked, f"continue_from: {step}; or move the checkpoints after step {now} away")
    if step is not None and step > total:
        raise UserError(
            f"the newest checkpoint in {directory} is of step {step}, and the recipe's run ends at {total}",
            "raise train.steps or train.epochs",
        )
    if longer is None:
        return None
    if longer.renews:
        return f"a new schedule begins after step {now}, and ends at step {total}"
    ended = longer.ended(steps_per_epoch)
    before, after = _warmup(longer.began, ended), _warmup(longer.now, total)
    if before != after:
        raise UserError(
            f"{directory} holds a run with a warm-up of {before} steps, and this recipe's has {after}",
            f"train: {{schedule: {{name: constant, warmup_steps: {before}}}}} keeps it",
        )
    return f"the run ends at step {total}; it was to end at step {ended}"


def _warmup(train: Mapping[str, Any], total: int) -> int:
    schedule = train.get("schedule", {})
    if schedule.get("warmup_ratio") is not None:
        return math.ceil(schedule["warmup_ratio"] * (total - (train.get("continue_from") or 0)))
    return schedule.get("warmup_steps") or 0
