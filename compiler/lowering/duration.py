"""How long a run trains, or trained: as the user says, as it was measured, or as it was planned."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.json_value import json_value
from recipec.compiler.wording import plural

if TYPE_CHECKING:
    from recipec.compiler.plan.results import RunLength

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class Hours:
    """How long training takes.

    Attributes:
        source: where that comes from, a phrase; it says whether it is measured or an estimate.
    """

    hours: float
    source: str


def training_hours(
    given: float | None = None,
    run: Path | None = None,
    planned: RunLength | None = None,
    steps: int | None = None,
) -> Hours:
    """How long training takes, from the first of these that is there.

    Args:
        given: by the user.
        run: folder of a run, with its metrics.jsonl.
        planned: of the recipe's plan.
        steps: of the recipe, where it gives them.

    Raises:
        ArtifactError: when none of them says it, or what one says has no meaning.
    """
    check_hours(given, "--train-hours")
    if given is not None:
        return Hours(given, "--train-hours")
    if run is not None:
        return measured_hours(run, steps)
    most = "at most, by the lines of the data: " if planned is not None and planned.source == "bound" else ""
    if planned is not None and planned.calibrated_hours is not None and planned.hours is not None:
        return Hours(
            planned.calibrated_hours,
            f"{most}estimate of `recipe plan`, calibrated by the one published measurement "
            f"({planned.hours:.2f} h without that)",
        )
    if planned is not None and planned.hours is not None:
        return Hours(planned.hours, f"{most}estimate of `recipe plan`")
    reason, way = "it was not planned", "--set train.steps=N"
    if planned is not None:
        reason = planned.note
    if planned is not None and planned.steps is not None:
        reason = "the compiler refused its step, so that the step's time is not known"
        way = "what `recipe plan` says to make the step fit"
    raise ArtifactError(
        f"it is not known how long the training takes: {reason}",
        f"give --train-hours, a measured run with --run DIR, or {way}",
    )


def measured_hours(run: Path, steps: int | None = None) -> Hours:
    """The duration of a run's steps, from its metrics.jsonl: compiling is part of the first, loading, saving
    and evaluating are not in it.

    Args:
        run: the folder that train.py wrote metrics.jsonl to.
        steps: that the recipe asks for, so that a run that ended before can be told; None where unknown.

    Raises:
        ArtifactError: when there are no metrics to read.
    """
    path = run / METRICS
    way_out = "give the folder that train.py wrote its metrics to, or the hours with --train-hours"
    try:
        content = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise ArtifactError(f"there is no {METRICS} in {run}", way_out) from None
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror or error}", way_out) from error
    seconds = dict(_step_seconds(content))
    if not seconds:
        raise ArtifactError(f"{path} has no training step that was timed", way_out)
    first, last = min(seconds), max(seconds)
    which = f"steps {first:,} to {last:,}"
    if len(seconds) != last - first + 1:
        which = f"{plural(len(seconds), 'step')} of {first:,} to {last:,}"
    if steps is not None and len(seconds) < steps:
        which += f" of the recipe's {steps:,}"
    return Hours(sum(seconds.values()) / 3600, f"measured: {which} in {path}, without loading and saving")


def check_hours(hours: float | None, flag: str) -> None:
    """Refuses hours that are below 0, infinite or NaN.

    Raises:
        ArtifactError: naming the flag.
    """
    if hours is not None and not 0 <= hours < math.inf:
        raise ArtifactError(f"{flag} is {hours:g}, which is no number of hours", f"for example {flag} 3.34")


def _step_seconds(content: str) -> Iterator[tuple[int, float]]:
    """(step, seconds) of each training step; lines that are cut off, and those of evaluations, are passed
    over."""
    for line in content.splitlines():
        entry = json_value(line)
        if not isinstance(entry, Mapping):
            continue
        step, seconds = entry.get("step"), entry.get("step_seconds")
        if isinstance(step, int) and isinstance(seconds, int | float) and 0 <= seconds < math.inf:
            yield step, float(seconds)
