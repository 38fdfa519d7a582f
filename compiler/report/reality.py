"""A plan's estimates next to the run's measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.pages.numbers import gib, hours, number, ratio, seconds
from recipec.compiler.report.run import Run

if TYPE_CHECKING:
    from recipec.compiler.emitters.backends import Backend
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.lowering.run_length import Statistics
    from recipec.compiler.plan.results import Plan


@dataclass(frozen=True)
class Line:
    """A figure: its estimate, interval ("" if there is none), measurement, and measured over estimated."""

    name: str
    estimate: str
    interval: str
    measured: str
    ratio: str


@dataclass(frozen=True)
class Reality:
    """The section that compares the two.

    Attributes:
        source: where the plan comes from.
        place: a sentence on what was measured where.
        lines: the table.
        mismatches: sentences on where the plan and the run differ.
    """

    plan: Plan
    source: str
    place: str
    lines: tuple[Line, ...]
    mismatches: tuple[str, ...]


def read_plan(file: Path) -> Plan:
    """Read the output of `recipe plan --json`.

    Raises:
        ArtifactError: when the file holds something else.
    """
    from recipec.compiler.plan.results import PLAN

    way_out = "recipe plan RECIPE --json > plan.json"
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
        return PLAN.validate_python(value["plan"])
    except FileNotFoundError:
        raise ArtifactError(f"there is no {file}", way_out) from None
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read: {error.strerror or error}", way_out) from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ArtifactError(f"{file} is not a plan as `recipe plan --json` prints it", way_out) from None


def kept_plan(run: Run) -> Plan | None:
    """Return the plan of a run's recipe if recipec's cache holds all that it needs; nothing is compiled."""
    program = run.program
    backend = _backend(run)
    if program is None or backend is None or program.accelerator.platform != "tpu":
        return None
    from recipec.compiler.plan.depth import parts
    from recipec.compiler.plan.identity import name
    from recipec.compiler.plan.planner import job, plan
    from recipec.compiler.plan.pool import cached

    for exact in (False, True):
        jobs = [job(program, (), part, backend) for part in parts(program, exact)]
        if all(cached(name(*one)) is not None for one in jobs):
            return plan(program, exact=exact, data=_statistics(run, program), backend=backend)
    return None


def reality(run: Run, plan: Plan, source: str) -> Reality:
    """Build the table of a run.

    Args:
        source: of the plan: a file, or the cache.
    """
    estimate, length = plan.estimate, plan.run
    known, counted = estimate.seconds > 0, run.peak_memory is not None
    step = estimate.seconds * length.micro_batches if known else None
    speed = length.tokens_per_second or None

    def interval(figure: float | None, write: Callable[[float], str], inverse: bool = False) -> str:
        """Format the interval. Time is proportional to the estimate's error, speed inversely proportional."""
        if not figure:
            return ""
        low, high = estimate.interval.of(1.0)
        ends = (figure / high, figure / low) if inverse else (figure * low, figure * high)
        return " to ".join(map(write, ends))

    of_rows = "" if length.source == "data" else ", rows counted as full"
    lines = (
        Line(
            "Optimizer step",
            seconds(step),
            interval(step, seconds),
            seconds(run.step_seconds),
            _over(run.step_seconds, step),
        ),
        Line(
            f"Tokens a second{of_rows}",
            number(speed),
            interval(speed, number, inverse=True),
            number(run.tokens_per_second),
            _over(run.tokens_per_second, speed),
        ),
        Line(
            "Peak memory of a device"
            if not run.on_cpu
            else "Peak memory of a device; measured: of the process",
            gib(estimate.memory.used),
            "",
            gib(run.peak_memory or 0) if counted else "not known",
            _over(run.peak_memory, estimate.memory.used),
        ),
        Line(
            "Hours in steps",
            hours(length.hours),
            interval(length.hours, hours),
            hours(run.hours),
            _over(run.hours, length.hours),
        ),
    )
    return Reality(plan, source, _place(run, plan), lines, tuple(_mismatches(run, plan)))


def _place(run: Run, plan: Plan) -> str:
    kind = run.devices.get("kind")
    if run.on_cpu:
        count = run.devices.get("count")
        what = f"{count} virtual CPU devices" if isinstance(count, int) and count > 1 else "a CPU"
        return (
            f"Measured on {what}, not on the {plan.topology} that was planned for: the ratios compare a CPU "
            "with a TPU, and do not test the plan."
        )
    if kind:
        return (
            f"Measured on {run.devices.get('count')} devices of the kind {kind}; planned for {plan.topology}."
        )
    return f"Planned for {plan.topology}. The devices of the run are not recorded."


def _mismatches(run: Run, plan: Plan) -> list[str]:
    out = []
    if plan.recipe != run.name:
        out.append(f"The plan is of the recipe {plan.recipe}, the run of {run.name}.")
    if run.recipe is None:
        return out
    from recipec.spec.core_schema import flow

    values = run.recipe.model_dump(mode="json")
    for path, planned in plan.settings.items():
        section, _, key = path.partition(".")
        ran = flow(values.get(section, {}).get(key))
        if ran != planned:
            out.append(f"The plan has {path} {planned}, the run {ran}.")
    if run.recipe.model.id != plan.model:
        out.append(f"The plan is of the model {plan.model}, the run of {run.recipe.model.id}.")
    return out


def _backend(run: Run) -> Backend | None:
    """Return the backend whose step a plan would estimate; None for TRL, which plans do not cover."""
    from recipec.compiler.emitters.backends import Backend

    scripts = {"train_torchax.py": Backend.TORCHAX, "train_trl.py": None}
    return scripts.get(str(run.facts.get("script")), Backend.TUNIX)


def _statistics(run: Run, program: Program) -> Statistics | None:
    """Return the run's own data statistics, in the form that a plan takes."""
    from recipec.compiler.lowering.run_length import Statistics

    found = run.facts.get("data")
    split = found.get("train") if isinstance(found, dict) else None
    if not isinstance(split, dict):
        return None
    answers = 2 if program.recipe.data.format == "preference" else 1
    try:
        rows, kept = split["rows"] // answers, split["kept"]
        return Statistics(kept, split["read"] - kept, rows, answers, split["row_tokens"]) if rows else None
    except (KeyError, TypeError):
        return None


def _over(measured: float | None, estimated: float | None) -> str:
    return ratio(measured / estimated) if measured and estimated else ""
