"""The document that `recipe diff A B --plan` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from recipec.compiler.pages.document import Document, Table, Text, sheet
from recipec.compiler.pages.numbers import gib_number, milliseconds, number, percent, traffic
from recipec.compiler.plan.plan_document import MEMORY
from recipec.compiler.plan.results import Collective, Plan
from recipec.compiler.wording import listing, mesh_axes

Write = Callable[[float], str]
"""Formats a figure."""

ESTIMATES = (
    "Times, tokens/s, MFU, hours and US$ are estimates; HBM and collectives are the compiler's own. "
    "Nothing was measured on a TPU."
)


def comparison(before: Plan, after: Plan) -> Document:
    """Return a comparison: a table of the figures whose printed values differ."""
    moved = dict.fromkeys(_name(c) for plan in (before, after) for c in plan.estimate.collectives)
    rows = []
    for (name, old, write), (_, new, _) in zip(_figures(before, moved), _figures(after, moved), strict=True):
        texts = ["unknown" if figure is None else write(figure) for figure in (old, new)]
        if texts[0] != texts[1]:
            rows.append([name, *texts, _change(old, new)])
    head = [Text(f"before: {_title(before)}"), Text(f"after:  {_title(after)}")]
    if not rows:
        return sheet("", head, [Text("Nothing changes in memory, time or cost.")])
    return sheet("", head, [Table(("", "before", "after", "change"), rows)], [Text(ESTIMATES)])


def _figures(plan: Plan, collectives: Iterable[str]) -> Iterator[tuple[str, float | None, Write]]:
    """Yield the figures by which plans are compared. A step that was not compiled has no times."""
    estimate, run, memory = plan.estimate, plan.run, plan.estimate.memory
    seconds, speed = estimate.seconds or None, run.tokens_per_second or None
    yield "HBM of a device", memory.used, _gib
    for key, (part, _) in MEMORY.items():
        yield f"  {part}", float(getattr(memory, key)), _gib
    yield "HBM available", memory.available, _gib
    yield "share of it", memory.share, percent
    yield "real tokens of a micro-batch", run.tokens_per_second * estimate.seconds or None, number
    yield "its step", seconds, milliseconds
    for name, taken in estimate.timeline.parts.items():
        yield f"  {name}", taken if seconds else None, milliseconds
    yield "a real token", 1 / speed if speed else None, milliseconds
    yield "tokens/s", speed, number
    yield "MFU", estimate.mfu or None, percent
    for name in collectives:
        arriving = sum(c.bytes for c in estimate.collectives if _name(c) == name)
        yield name, arriving if seconds else None, traffic
    yield "devices", plan.devices, number
    yield "steps of the run", run.steps, number
    yield "hours", run.hours, _hundredths
    yield "US$", run.usd, _hundredths
    yield "US$ a million tokens", run.usd_per_million_tokens, _hundredths


def _title(plan: Plan) -> str:
    return f"{plan.recipe} on {plan.accelerator.partition(':')[0]}, mesh {mesh_axes(plan.axes)}"


def _name(collective: Collective) -> str:
    """Name a collective with the axes that it runs over: "all-gather, fsdp and tp over DCN"."""
    axes = listing(collective.axes) or "other groups"
    return f"{collective.kind}, {axes}{' over DCN' if collective.over_dcn else ''}"


def _change(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return ""
    if not old:
        return "new"
    return f"{100 * (new / old - 1):+,.1f} %" if new else "gone"


def _gib(count: float) -> str:
    return f"{gib_number(count)} GiB"


def _hundredths(figure: float) -> str:
    return f"{figure:,.2f}"
