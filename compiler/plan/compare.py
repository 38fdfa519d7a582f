"""`recipe diff A B --plan`: show what a change does to memory, time and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from recipec.compiler.plan.results import Collective, Plan, Timeline
from recipec.compiler.plan.units import aligned, gib, groups, milliseconds, percent, traffic, wrapped
from recipec.compiler.wording import mesh_axes

PARTS = {
    "weights": "base weights",
    "adapters": "adapters",
    "optimizer": "optimizer",
    "batch": "batch",
    "padding": "padding of their layouts",
    "temporaries": "activations and temporaries",
    "code": "code",
}
"""The parts of Memory, in words."""

TIMES: dict[str, Callable[[Timeline], float]] = {
    "matrix products": lambda found: found.products,
    "other operations": lambda found: found.memory,
    "custom kernels": lambda found: found.kernels,
    "exposed collectives": lambda found: found.exposed_in(True),
    "exposed copies": lambda found: found.exposed_in(False),
}
"""The parts of a step, which add up to its time."""

ESTIMATES = (
    "Times, tokens/s, MFU, hours and US$ are estimates; HBM and collectives are the compiler's own. "
    "Nothing was measured on a TPU."
)


@dataclass(frozen=True)
class ComparedFigure:
    """A number of both plans.

    Attributes:
        name: the label in the table.
        before, after: the values; None where unknown.
        write: formats a value for the table.
    """

    name: str
    before: float | None
    after: float | None
    write: Callable[[float], str]

    @property
    def texts(self) -> tuple[str, str]:
        before, after = ("unknown" if n is None else self.write(n) for n in (self.before, self.after))
        return before, after

    @property
    def change(self) -> float | None:
        """The relative change, 0.1 for 10 % more; None where a value is unknown or the first one is 0."""
        return None if self.after is None or not self.before else self.after / self.before - 1


def compare(before: Plan, after: Plan) -> str:
    """Return the text that the command prints: a table of the figures whose printed values differ."""
    head = [*wrapped(f"before: {_title(before)}"), *wrapped(f"after:  {_title(after)}"), ""]
    changed = [figure for figure in figures(before, after) if figure.texts[0] != figure.texts[1]]
    if not changed:
        return "\n".join([*head, "Nothing changes in memory, time or cost."]) + "\n"
    rows = [["", "before", "after", "change"]]
    rows += [[figure.name, *figure.texts, _change(figure)] for figure in changed]
    return "\n".join([*head, *aligned(rows, "<>>>", indent=""), "", *wrapped(ESTIMATES)]) + "\n"


def figures(before: Plan, after: Plan) -> list[ComparedFigure]:
    """Return every figure by which two plans are compared, changed or not.

    A step that was not compiled has no times.
    """

    def figure(
        name: str, of: Callable[[Plan], float | None], write: Callable[[float], str]
    ) -> ComparedFigure:
        return ComparedFigure(name, of(before), of(after), write)

    def of_memory(key: str) -> Callable[[Plan], float]:
        return lambda plan: float(getattr(plan.estimate.memory, key))

    def timed(name: str) -> Callable[[Plan], float | None]:
        return lambda plan: TIMES[name](plan.estimate.timeline) if plan.estimate.seconds else None

    def moved(name: str) -> Callable[[Plan], float | None]:
        return lambda plan: _moved(plan, name) if plan.estimate.seconds else None

    collectives = dict.fromkeys(_name(c) for plan in (before, after) for c in plan.estimate.collectives)
    return [
        figure("HBM of a device", of_memory("used"), _gib),
        *(figure(f"  {words}", of_memory(key), _gib) for key, words in PARTS.items()),
        figure("HBM available", of_memory("available"), _gib),
        figure("share of it", of_memory("share"), percent),
        figure("real tokens of a micro-batch", _tokens, _whole),
        figure("its step", lambda plan: plan.estimate.seconds or None, milliseconds),
        *(figure(f"  {name}", timed(name), milliseconds) for name in TIMES),
        figure("a real token", _seconds_per_token, milliseconds),
        figure("tokens/s", lambda plan: plan.run.tokens_per_second or None, _whole),
        figure("MFU", lambda plan: plan.estimate.mfu or None, percent),
        *(figure(name, moved(name), traffic) for name in collectives),
        figure("devices", lambda plan: plan.devices, _whole),
        figure("steps of the run", lambda plan: plan.run.steps, _whole),
        figure("hours", lambda plan: plan.run.hours, _hundredths),
        figure("US$", lambda plan: plan.run.usd, _hundredths),
        figure("US$ a million tokens", lambda plan: plan.run.usd_per_million_tokens, _hundredths),
    ]


def _title(plan: Plan) -> str:
    return f"{plan.recipe} on {plan.accelerator.partition(':')[0]}, mesh {mesh(plan)}"


def mesh(plan: Plan) -> str:
    """Write a plan's mesh: "fsdp 4 x tp 1"."""
    return mesh_axes(plan.axes)


def _name(collective: Collective) -> str:
    return f"{collective.kind}, {groups(collective)}"


def _moved(plan: Plan, name: str) -> float:
    return sum(c.bytes for c in plan.estimate.collectives if _name(c) == name)


def _tokens(plan: Plan) -> float | None:
    return plan.run.tokens_per_second * plan.estimate.seconds or None


def _seconds_per_token(plan: Plan) -> float | None:
    speed = plan.run.tokens_per_second
    return 1 / speed if speed else None


def _change(figure: ComparedFigure) -> str:
    if figure.before is None or figure.after is None:
        return ""
    if figure.change is None:
        return "new"
    return f"{100 * figure.change:+,.1f} %" if figure.after else "gone"


def _gib(count: float) -> str:
    return f"{gib(count)} GiB"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _hundredths(number: float) -> str:
    return f"{number:,.2f}"
