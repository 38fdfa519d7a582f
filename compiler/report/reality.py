"""A plan's estimates next to the run's measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.run_length import Statistics
from recipec.compiler.pages.document import Block, Section, Table, Text
from recipec.compiler.pages.numbers import NOT_KNOWN, gib, hours, number, ratio, seconds
from recipec.compiler.plan.depth import parts
from recipec.compiler.plan.identity import name
from recipec.compiler.plan.planner import job, plan
from recipec.compiler.plan.pool import cached
from recipec.compiler.plan.results import PLAN
from recipec.compiler.report.recorded_run import ReportedRun
from recipec.spec.core_schema import flow

if TYPE_CHECKING:
    from recipec.compiler.lowering.backend import Backend
    from recipec.compiler.lowering.program import Program
    from recipec.compiler.lowering.run_length import Statistics
    from recipec.compiler.plan.results import Plan


def reality_section(run: ReportedRun, file: Path | None) -> Section:
    """Return the section that compares the run with a plan, or that says why there is no plan.

    Args:
        file: the plan; None for one in recipec's cache.

    Raises:
        ArtifactError: when the file is no plan.
    """
    plan = _kept_plan(run) if file is None else _read_plan(file)
    if plan is not None:
        return _compared(run, plan, "recipec's cache" if file is None else str(file))
    why_not = (
        "There is no plan of this recipe in recipec's cache. `recipe plan RECIPE` makes one, and "
        "`recipe plan RECIPE --json > plan.json` writes a file for --plan."
    )
    if run.program is not None and run.program.accelerator.platform != "tpu":
        why_not = f"The recipe runs on {run.program.accelerator.name}, which recipec does not plan for."
    return Section("reality", "Plan and reality", (), (Text(why_not, ""),))


def _read_plan(file: Path) -> Plan:
    """Read the output of `recipe plan --json`.

    Raises:
        ArtifactError: when the file holds something else.
    """
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


def _kept_plan(run: ReportedRun) -> Plan | None:
    """Return the plan of a run's recipe if recipec's cache holds all that it needs; nothing is compiled."""
    program = run.program
    backend = _backend(run)
    if program is None or backend is None or program.accelerator.platform != "tpu":
        return None
    for exact in (False, True):
        jobs = [job(program, (), part, backend) for part in parts(program, exact).refined]
        if all(cached(name(*job)) is not None for job in jobs):
            return plan(program, exact=exact, data=_statistics(run, program), backend=backend)
    return None


def _compared(run: ReportedRun, plan: Plan, source: str) -> Section:
    """Return the section of a run and its plan.

    Args:
        source: of the plan: a file, or the cache.
    """
    estimate, length = plan.estimate, plan.run
    step = estimate.seconds * length.micro_batches if estimate.seconds > 0 else None
    speed, memory = length.tokens_per_second or None, run.peak_memory

    def line(
        name: str,
        write: Callable[[float | None], str],
        planned: float | None,
        measured: float | None,
        inverse: bool = False,
    ) -> tuple[str, ...]:
        """Return a row. Time is proportional to the estimate's error, speed inversely proportional."""
        low, high = estimate.interval.of(1.0)
        low, high = (1 / high, 1 / low) if inverse else (low, high)
        interval = f"{write(planned * low)} to {write(planned * high)}" if planned else ""
        over = ratio(measured / planned) if measured and planned else ""
        return name, write(planned), interval, write(measured), over

    used = estimate.memory.used
    shown = gib(memory) if memory is not None else NOT_KNOWN
    rows = [
        line("Optimizer step", seconds, step, run.step_seconds),
        line(
            "Tokens a second" if length.source == "data" else "Tokens a second, rows counted as full",
            number,
            speed,
            run.tokens_per_second,
            inverse=True,
        ),
        (
            "Peak memory of a device; measured: of the process" if run.on_cpu else "Peak memory of a device",
            *(gib(used), "", shown, ratio(memory / used) if memory and used else ""),
        ),
        line("Hours in steps", hours, length.hours, run.hours),
    ]
    head = ("", "estimate", "its interval", "measured", "measured to estimate")
    blocks: tuple[Block, ...] = (
        Text(_place(run, plan), "alarm" if run.on_cpu else "muted"),
        Table(head, rows, label="Plan and reality"),
        Text(f"Plan from {source}, for {plan.accelerator}. {length.note}"),
        *(Text(sentence, "alarm") for sentence in _mismatches(run, plan)),
    )
    aside = ("Estimates of libtpu's compiler next to the measurements.",)
    return Section("reality", "Plan and reality", aside, blocks)


def _place(run: ReportedRun, plan: Plan) -> str:
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


def _mismatches(run: ReportedRun, plan: Plan) -> list[str]:
    out = []
    if plan.recipe != run.name:
        out.append(f"The plan is of the recipe {plan.recipe}, the run of {run.name}.")
    if run.recipe is None:
        return out
    values = run.recipe.model_dump(mode="json")
    for path, planned in plan.settings.items():
        section, _, key = path.partition(".")
        ran = flow(values.get(section, {}).get(key))
        if ran != planned:
            out.append(f"The plan has {path} {planned}, the run {ran}.")
    if run.recipe.model.id != plan.model:
        out.append(f"The plan is of the model {plan.model}, the run of {run.recipe.model.id}.")
    return out


def _backend(run: ReportedRun) -> Backend | None:
    """Return the backend whose step a plan would estimate; None for TRL, which plans do not cover."""
    scripts = {"train_torchax.py": Backend.TORCHAX, "train_trl.py": None}
    return scripts.get(str(run.facts.get("script")), Backend.TUNIX)


def _statistics(run: ReportedRun, program: Program) -> Statistics | None:
    """Return the run's own data statistics, in the form that a plan takes."""
    split = run.data.get("train")
    if not isinstance(split, dict):
        return None
    answers = 2 if program.recipe.data.format == "preference" else 1
    try:
        rows, dropped = split["rows"] // answers, split["read"] - split["kept"]
        samples = split["samples"] if "samples" in split else split["kept"]
        return Statistics(samples, dropped, rows, answers, split["row_tokens"]) if rows else None
    except (KeyError, TypeError):
        return None
