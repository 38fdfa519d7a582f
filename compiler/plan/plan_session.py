"""Run one `recipe plan`: the plan, the search and the serving plan if requested, and the diagnostics."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipec.compiler.checks.backends import diagnosed
from recipec.compiler.checks.lora import N0227
from recipec.compiler.lower import Lowered, lower
from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import Statistics, statistics
from recipec.compiler.pages.numbers import gib_number, milliseconds
from recipec.compiler.plan import fit, identity
from recipec.compiler.plan.depth import parts
from recipec.compiler.plan.planner import estimate, estimate_of, job, plan
from recipec.compiler.plan.pool import Progress, cached
from recipec.compiler.plan.results import PLAN, SEARCH, Estimate, Plan, RunLength, Search
from recipec.compiler.plan.search import SearchOptions, search
from recipec.compiler.roofline.server_estimate import plan_serving, too_small
from recipec.compiler.roofline.server_results import SERVING_PLAN, ServingPlan
from recipec.compiler.wording import listing
from recipec.runtime.model.partition_rules import data_parallel
from recipec.spec.codes import Code
from recipec.spec.diagnostics import Diagnostic, render_json
from recipec.spec.load import load, locate

if TYPE_CHECKING:
    from recipec.spec.load import Loaded

OTHER = "mesh.axes={fsdp: 2, tp: 2}"
DIGITS = 15
"""Significant digits of a decimal number that a float keeps."""


@dataclass(frozen=True)
class PlanOptions:
    """The options of the command line.

    Attributes:
        sets: the --set arguments.
        exact: whether to compile all layers to the end.
        search: whether to search for better configurations.
        most: configurations that the search compiles at most.
        free_batch: whether the search may raise the global batch.
        model, data_dir: folders of the tokenizer and of the data; None for the recipe's own places.
        backend: the backend whose step is compiled.
    """

    sets: tuple[str, ...] = ()
    exact: bool = False
    search: bool = False
    most: int = 24
    free_batch: bool = False
    model: Path | None = None
    data_dir: Path | None = None
    backend: Backend = Backend.TUNIX


@dataclass(frozen=True)
class Planned:
    """The results of `recipe plan`.

    Attributes:
        search: None if no search was requested.
        serving: None without a `serve` section.
        diagnostics: with their places in the recipe. An error means that the plan fails.
    """

    plan: Plan
    search: Search | None
    serving: ServingPlan | None
    diagnostics: tuple[Diagnostic, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the results for --json."""
        return {
            "plan": PLAN.dump_python(self.plan, mode="json"),
            "search": None if self.search is None else SEARCH.dump_python(self.search, mode="json"),
            "serving": None if self.serving is None else SERVING_PLAN.dump_python(self.serving, mode="json"),
            "diagnostics": render_json(self.diagnostics),
        }


def run(
    loaded: Loaded,
    lowered: Lowered,
    asked: PlanOptions,
    progress: Progress | None = None,
    on_first: Callable[[Plan], None] | None = None,
) -> Planned:
    """Plan a recipe that its backend can train.

    Args:
        lowered: the lowered recipe, with a program.
        on_first: called with the first estimate (see `planner.plan`).

    Raises:
        ArtifactError: when it cannot be compiled, or its data cannot be read.
        KeyboardInterrupt: after Ctrl-C; finished compiles are in the cache.
        compiler.plan.search.SearchInterrupted: after Ctrl-C during a search, with the result so far.
    """
    program = lowered.program
    assert program is not None
    counted = statistics(program, asked.model, asked.data_dir)
    planned = plan(program, asked.sets, asked.exact, counted, progress, asked.backend, on_first)
    if any(diagnostic.code == N0227 for diagnostic in lowered.diagnostics):
        planned = replace(
            planned, notes=(*planned.notes, other_mesh(program, planned, asked.sets, asked.exact))
        )
    diagnostics = [*diagnosed(program, (asked.backend,)), *_fit(program, asked, planned.estimate, progress)]
    diagnostics += [*_rollout(program, planned), *check_budget(program, planned)]
    tried = None
    if asked.search:
        per_row = counted.tokens_per_row if isinstance(counted, Statistics) else None
        options = SearchOptions(asked.sets, per_row, asked.most, asked.free_batch, asked.backend)
        tried = search(program, options, progress)
    serving = None if program.recipe.serve is None else plan_serving(program)
    shortage = None if serving is None else too_small(serving)
    diagnostics += [] if shortage is None else [shortage]
    return Planned(planned, tried, serving, tuple(locate(diagnostics, loaded.sources)))


def plan_run(program: Program, asked: PlanOptions, progress: Progress | None = None) -> RunLength:
    """Return the length of a recipe's run, from its plan."""
    counted = statistics(program, asked.model, asked.data_dir)
    return plan(program, asked.sets, asked.exact, counted, progress, asked.backend).run


def _fit(
    program: Program, asked: PlanOptions, estimate: Estimate, progress: Progress | None
) -> Sequence[Diagnostic]:
    """Return the diagnostic of a step that does not fit, with a change that fits if one was found."""
    if estimate.memory.headroom >= 0:
        return []

    def fits(sets: tuple[str, ...]) -> Estimate | None:
        every = (*asked.sets, *sets)
        changed = lower(load(program.source, every), planning=True).program
        if changed is None:
            return None
        return estimate_of(changed, every, progress, asked.backend)

    way_out = fit.find(program, fits, overrides=asked.sets, estimate=estimate, backend=asked.backend)
    return [fit.diagnostic(program, estimate, way_out)]


E1009 = Code(
    "E1009",
    "completions do not fit",
    cause="While it generates completions, a device holds the training state, the weights of the rollout, "
    "the keys and values of all rows that are generated at once, and what a pass works on. Together they "
    "are more than each device has.",
    cure="Set `rollout.rows` to fewer completions at once, or use another `rollout.axes`.",
)


def _rollout(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    """Yield the diagnostic of a rollout that does not fit, with rows that would fit if any do."""
    rolled, available = plan.generation, plan.estimate.memory.available
    if rolled is None or rolled.need.total <= available:
        return
    need, parts = rolled.need, data_parallel(rolled.axes)
    kept = [
        (need.state, "of training state"),
        (need.weights, "of weights in the layout of the rollout"),
        (need.cache, f"of keys and values of {rolled.rows:,} rows"),
        (need.work, "of logits, prompts and code"),
    ]
    room = available - need.state - need.weights
    fitting = int(rolled.rows * room / (need.cache + need.work)) // parts * parts
    help = f"rollout: {{rows: {fitting}}}" if fitting > 0 else "rollout: {axes: AXES} with a larger tp"
    yield Diagnostic(
        E1009,
        f"generating completions needs {gib_number(need.total)} GiB of each device's memory, and a device of "
        f"{program.accelerator.name} has {gib_number(available)} GiB: "
        f"{listing([f'{gib_number(size)} GiB {what}' for size, what in kept if size])}",
        "rollout.rows",
        help,
    )


def other_mesh(program: Program, plan: Plan, sets: Sequence[str], exact: bool) -> str:
    """Return a sentence with the time of an optimizer step and a device's memory on the other mesh.

    The figures come from earlier plans in the cache. Without them, the sentence has the command that plans
    the other mesh. Nothing is compiled.

    Args:
        program, plan: a program for which the checks give note N0227, and its own plan.
        sets, exact: the --set arguments and --exact of that plan.
    """
    every, backend = (*sets, OTHER), Backend(plan.backend)
    other = lower(load(program.source, every), planning=True).program
    name = "fsdp 2 x tp 2, which note N0227 names,"
    if other is None:
        return f"{name} is refused for this recipe; recipe check --set {shlex.quote(OTHER)} shows the reason"
    jobs = [job(other, every, part, backend) for part in parts(other, exact).refined]
    results = [compiled for compiled in (cached(identity.name(*job)) for job in jobs) if compiled is not None]
    if len(results) < len(jobs):
        words = ["recipe", "plan", str(program.source), *(["--exact"] if exact else [])]
        words += ["--backend", backend.value] if backend is not Backend.TUNIX else []
        words += [word for setting in every for word in ("--set", setting)]
        return f"{name} is not planned yet; its time and memory: {shlex.join(words)}"
    other_estimate = estimate(other, results)
    if not other_estimate.seconds:
        memory = (
            f"{gib_number(other_estimate.memory.used)} GiB of {gib_number(other_estimate.memory.available)}"
        )
        return f"{name} does not fit: it takes {memory}"
    step = milliseconds(other_estimate.seconds * other.accumulation_steps)
    planned_step = milliseconds(plan.estimate.seconds * program.accumulation_steps)
    return (
        f"{name} takes an estimated {step} for an optimizer's step and "
        f"{gib_number(other_estimate.memory.used)} GiB of a device, where this mesh takes {planned_step} and "
        f"{gib_number(plan.estimate.memory.used)} GiB"
    )


def check_budget(program: Program, plan: Plan) -> list[Diagnostic]:
    """Return diagnostics for figures above the budget, and for limits that cannot be checked.

    Hours and US$ are compared with the estimate; the diagnostic also gives the estimate's interval.
    """
    return [*_memory(program, plan), *_run(program, plan)]


E1002 = Code(
    "E1002",
    "over the memory budget",
    cause="The step's share of each device's memory is above `budget.max_hbm_share`.",
    cure="Use a smaller micro-batch, more rematerialization, or a larger share.",
)


def _memory(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    most, memory = program.recipe.budget.max_hbm_share, plan.estimate.memory
    if most is None or memory.share <= most:
        return
    over = gib_number(memory.used - most * memory.available)
    over = "less than 0.01" if over == "0.00" else over
    yield Diagnostic(
        E1002,
        f"the step takes an estimated {_above(100 * memory.share, 100 * most, 1)} % of each device's HBM, "
        f"and budget.max_hbm_share allows {_allowed(100 * most, 1)} %",
        "budget.max_hbm_share",
        f"it takes {gib_number(memory.used)} of {gib_number(memory.available)} GiB, {over} GiB too much: "
        "lower train.micro_batch_size, choose a remat.policy that stores less, or allow more",
    )


E1003 = Code(
    "E1003",
    "over the time budget",
    cause="The estimated training time is above `budget.max_hours`.",
    cure="Use a faster configuration (`recipe plan --search`), fewer steps, or more hours.",
)

E1004 = Code(
    "E1004",
    "over the cost budget",
    cause="The estimated cost of the training is above `budget.max_usd`.",
    cure="Use a cheaper configuration (`recipe plan --search`), fewer steps, or more US$.",
)


def _run(program: Program, plan: Plan) -> Iterator[Diagnostic]:
    budget, run = program.recipe.budget, plan.run
    for key, most, planned, code, verb, unit, better in (
        ("max_hours", budget.max_hours, run.hours, E1003, "takes", "{} hours", "faster"),
        ("max_usd", budget.max_usd, run.usd, E1004, "costs", "US$ {}", "cheaper"),
    ):
        if most is None:
            continue
        if planned is None or (run.source == "bound" and planned > most):
            yield _unchecked(key, plan)
        elif planned > most:
            yield Diagnostic(
                code,
                f"the run {verb} an estimated {unit.format(_above(planned, most))}, and budget.{key} allows "
                f"{_allowed(most)}",
                f"budget.{key}",
                f"with the known errors of such estimates it is {_between(run.interval.of(planned), unit)}; "
                f"`recipe plan --search` looks for a {better} configuration",
            )


def _between(interval: tuple[float, float], unit: str) -> str:
    low, high = interval
    return unit.format(f"{low:,.2f} to {high:,.2f}")


def _above(number: float, most: float, digits: int = 2) -> str:
    """Format a number with enough decimals, and at least `digits`, to show that it is above `most`."""
    written = (f"{number:,.{count}f}" for count in range(digits, DIGITS))
    return next((text for text in written if float(text.replace(",", "")) > most), repr(number))


def _allowed(most: float, digits: int = 0) -> str:
    """Format a limit as the recipe gives it, with at least `digits` decimals."""
    text = f"{most:,.{DIGITS}g}"
    return text if "." in text or "e" in text or not digits else f"{most:,.{digits}f}"


W1005 = Code(
    "W1005",
    "budget that cannot be checked",
    cause="The plan does not know the length of the run or the price of the machine, which the budget needs.",
    cure="Give `train.steps`, or put the data next to the recipe. Give `cost.train_usd_per_hour`.",
)


def _unchecked(key: str, plan: Plan) -> Diagnostic:
    """Return the warning that a budget of hours or US$ cannot be checked, because the plan has no figure."""
    if plan.run.steps is None:
        reason = "the length of the run is not known"
        help = (
            "give train.steps, or put the data next to the recipe and give its tokenizer's folder with "
            "--model"
        )
    elif plan.run.hours is None:
        reason = "the step does not fit, so its time is not known"
        help = "make it fit first: lower train.micro_batch_size, or choose a remat.policy that stores less"
    elif key == "max_hours" or plan.run.usd is not None:
        reason = (
            f"the run has at most {plan.run.steps:,} steps, which are above the limit, but may have fewer"
        )
        help = (
            "give train.steps, or give the folder of the data's tokenizer with --model, so that they are "
            "counted"
        )
    else:
        reason = f"{plan.accelerator.partition(':')[0]} has no list price"
        help = "give the whole machine's price as cost.train_usd_per_hour"
    return Diagnostic(W1005, f"budget.{key} cannot be checked: {reason}", f"budget.{key}", help)
