"""The figures at the top of the page, and those of the run."""

from __future__ import annotations

from dataclasses import dataclass

from recipec.compiler.plan import calibration
from recipec.compiler.plan.page.memory import left
from recipec.compiler.plan.page.numbers import NOT_KNOWN, capacity, gib, hours, ms, number, percent, usd
from recipec.compiler.plan.results import Plan
from recipec.compiler.wording import mesh_axes, plural

NO_PRICE = "no price"


@dataclass(frozen=True)
class Figure:
    """A figure with its unit, what it is called, and lines below; `bad` when something is wrong with it."""

    name: str
    value: str
    below: tuple[str, ...]
    bad: bool = False


def figures(plan: Plan) -> list[Figure]:
    """Each as estimated, with the calibrated one below it."""
    estimate, run, memory = plan.estimate, plan.run, plan.estimate.memory
    known = estimate.seconds > 0
    calibrated_mfu = estimate.mfu * estimate.seconds / estimate.calibrated_seconds if known else None
    return [
        Figure(
            "Step of a micro-batch",
            ms(estimate.seconds) if known else NOT_KNOWN,
            _calibrated(ms(estimate.calibrated_seconds)) if known else ("the compiler refused it",),
        ),
        Figure(
            tokens(plan),
            number(run.tokens_per_second) if known else NOT_KNOWN,
            _calibrated(number(run.calibrated_tokens_per_second)) if known else (),
        ),
        Figure(
            "Model FLOPs utilisation",
            percent(estimate.mfu) if known else NOT_KNOWN,
            _calibrated(percent(calibrated_mfu)) if known else (),
        ),
        Figure(
            "HBM of a device",
            percent(memory.share),
            (f"{gib(memory.used)} of {capacity(memory.available)}", left(memory)),
            bad=memory.headroom < 0,
        ),
        Figure(
            f"Run{_bound(plan)}",
            hours(run.hours),
            _calibrated(hours(run.calibrated_hours)) if run.hours is not None else (),
        ),
        Figure(
            f"Cost of the run{_bound(plan)}",
            NO_PRICE if run.usd_per_hour is None else usd(run.usd),
            _calibrated(usd(run.calibrated_usd)) if run.usd is not None else (),
        ),
    ]


def tokens(plan: Plan) -> str:
    """What tokens a second are: without the data, rows count as full."""
    return "Real tokens a second" if plan.run.source == "data" else "Tokens a second, at most"


def _bound(plan: Plan) -> str:
    """Of figures that are the most they can be."""
    return ", at most" if plan.run.source == "bound" else ""


def hardware(plan: Plan) -> list[tuple[str, str]]:
    """Name and value of what the recipe runs on."""
    axes = mesh_axes(plan.axes)
    slices = f"{plural(plan.slices, 'slice')} of " if plan.slices > 1 else ""
    return [
        ("Model", plan.model),
        ("Accelerator", plan.accelerator),
        ("Topology", f"{slices}{plan.topology}"),
        ("Devices", f"{plural(plan.devices, 'device')} on {plural(plan.hosts, 'host')}"),
        ("Mesh", axes),
        ("Step of", plan.script),
    ]


def run(plan: Plan) -> list[tuple[str, str, str]]:
    """Name, estimate and calibrated value of each figure of the whole run; "" where there is only one."""
    estimate, run = plan.estimate, plan.run
    known, counted = run.tokens_per_second > 0, run.source == "data"
    return [
        (f"Optimizer steps{_bound(plan)}", number(run.steps), ""),
        ("Micro-batches a step", number(run.micro_batches), ""),
        ("Rows of a micro-batch", f"{number(estimate.rows)} of {number(estimate.row_length)} tokens", ""),
        ("Real tokens a row" if counted else "Tokens a row, at most", number(run.tokens_per_row), ""),
        (
            tokens(plan),
            number(run.tokens_per_second) if known else NOT_KNOWN,
            number(run.calibrated_tokens_per_second) if known else "",
        ),
        (
            f"Time{_bound(plan)}",
            hours(run.hours),
            hours(run.calibrated_hours) if run.hours is not None else "",
        ),
        ("Price an hour", NO_PRICE if run.usd_per_hour is None else usd(run.usd_per_hour), ""),
        (
            "A million real tokens" if counted else "A million tokens, at least",
            usd(run.usd_per_million_tokens),
            usd(run.usd_per_million_tokens * estimate.calibrated_seconds / estimate.seconds)
            if known and run.usd_per_million_tokens is not None
            else "",
        ),
        (f"Cost{_bound(plan)}", usd(run.usd), usd(run.calibrated_usd) if run.usd is not None else ""),
    ]


def rests_on(plan: Plan) -> list[str]:
    """Sentences on what is estimated, and from what."""
    estimate = plan.estimate
    whole = estimate.compiled_layers == (estimate.layers,)
    return [
        "Everything on this page is an estimate: libtpu compiled the training step on a machine without a "
        "TPU. Nothing was measured on one.",
        *(
            [f"All {plural(estimate.layers, 'layer')} were compiled; nothing is extrapolated."]
            if whole
            else []
        ),
        "Bytes, FLOPs and times are those of one device and one micro-batch, forward, backward and the "
        "optimizer's update.",
        f"Compiling took {estimate.compile_seconds:,.0f} s"
        + (", and this plan came from the cache." if plan.cached else f", this plan {plan.seconds:,.0f} s."),
        # It stands beside the calibrated figures.
        *(note for note in plan.notes if note != calibration.sentence()),
    ]


def _calibrated(value: str) -> tuple[str, ...]:
    return (f"{value} calibrated",)
