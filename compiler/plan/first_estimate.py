"""Foretell the compile of all layers from schedules of fewer layers.

Each pattern of layers adds the same work, the same transfers and nearly the same memory. So a figure of all
layers is a weighted sum of the figures of shorter models (`depth.Parts.shares`). docs/recipes.md compares
such sums with the schedules of all layers.

A schedule takes seconds, and code, which has the cycles of each operation, minutes. Where operations usually
take the same multiple of their FLOPs and bytes (`rates.usual_prices`), the first estimate does without code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from recipec.compiler.lowering.backend import Backend
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import rates
from recipec.compiler.plan.depth import Part, Parts
from recipec.compiler.plan.results import Collective, Compiled, Interval, Kernel, Timeline
from recipec.compiler.plan.schedule import Prices
from recipec.compiler.plan.timeline import combined

TIME_ERROR, USUAL_ERROR, PICTURES_ERROR = 0.02, 0.1, 0.2
"""The most by which a first estimate's seconds differ from the plan's own: with libtpu's cycles, without, and
without where a vision tower works too, whose products have other sizes. tests/recipes holds them, and those
of memory, for the recorded plans."""
MEMORY_ERROR, EXPERTS_MEMORY_ERROR = 0.1, 0.2
"""The same for bytes, and those of a model with experts. Memory is no sum where all layers take most of it at
another moment than few do."""

SUMMED = (
    *("weights", "adapters", "optimizer", "batch"),
    *("arguments", "temporaries", "code", "flops", "bytes"),
)
"""Fields of a compile that grow with the layers."""
COUNTED = ("layers", "instructions", "count")
"""The same, in whole numbers."""
TOLD_APART = ("kind", "name", "axes", "over_dcn")
"""Fields that tell collectives, and kernels, apart."""


@dataclass(frozen=True)
class FirstParts:
    """The compiles of a first estimate.

    Attributes:
        scheduled: schedules of few layers, or of all layers where few do not stand for them.
        shares: a figure of all layers is the sum of the scheduled figures, each times its share.
        end: the layers that are compiled to the end for the cycles of their operations; None where `usual`
            has what operations take.
        usual: as in `rates.usual_prices`.
        error: the most by which the estimated seconds differ from the plan's own, as a share.
    """

    scheduled: tuple[Part, ...]
    shares: tuple[float, ...]
    end: Part | None
    usual: Prices | None
    error: float

    @property
    def every(self) -> tuple[Part, ...]:
        """All compiles, the one to the end first."""
        return (*([] if self.end is None else [self.end]), *self.scheduled)

    @property
    def quick(self) -> bool:
        """Whether no code is generated, which takes most of a compile."""
        return self.end is None


def first_parts(program: Program, parts: Parts, backend: Backend) -> FirstParts | None:
    """Return the compiles of a program's first estimate; None if the plan's own are no slower."""
    usual = rates.usual_prices(program) if backend is Backend.TUNIX else None
    if parts.end is None:
        return None
    if usual is not None:
        scheduled, shares = (parts.shallow, parts.shares) if parts.shallow else ((parts.whole,), (1.0,))
        error = USUAL_ERROR if program.recipe.data.images is None else PICTURES_ERROR
        return FirstParts(scheduled, shares, None, usual, error)
    return FirstParts(parts.shallow, parts.shares, parts.end, None, TIME_ERROR) if parts.shallow else None


def memory_error(program: Program) -> float:
    """Return the most by which a first estimate's bytes differ from the plan's own, as a share."""
    return EXPERTS_MEMORY_ERROR if program.architecture.expert_layers else MEMORY_ERROR


def foretold(shallow: Sequence[Compiled], shares: Sequence[float]) -> Compiled:
    """Return the compile of all layers, without its schedule.

    Args:
        shallow: schedules of fewer layers, none of which the compiler refused.
        shares: the share of each in the sum.
    """
    rows = [
        {name: getattr(compiled, name) for name in (*SUMMED, "layers", "instructions")}
        for compiled in shallow
    ]
    (figures,) = _added([[row] for row in rows], shares)
    collectives = _added([[asdict(row) for row in compiled.collectives] for compiled in shallow], shares)
    kernels = _added([[asdict(row) for row in compiled.kernels] for compiled in shallow], shares)
    return replace(
        max(shallow, key=lambda compiled: compiled.layers),
        **figures,
        collectives=tuple(Collective(**row) for row in collectives),
        kernels=tuple(Kernel(**row) for row in kernels),
        trace_seconds=sum(compiled.trace_seconds for compiled in shallow),
        compile_seconds=sum(compiled.compile_seconds for compiled in shallow),
    )


def foretold_time(shallow: Sequence[Timeline], shares: Sequence[float]) -> Timeline:
    """Return the timeline of all layers, with the spans of the last shallow one, which are not all.

    Args:
        shallow: the timelines of the shallow schedules.
    """
    return combined(
        shallow, lambda seconds: sum(share * part for share, part in zip(shares, seconds, strict=True))
    )


def _added(tables: Sequence[Sequence[dict[str, Any]]], shares: Sequence[float]) -> list[dict[str, Any]]:
    """Add up tables row by row, each table times its share; no figure is below 0."""
    sums: dict[tuple[Any, ...], dict[str, Any]] = {}
    for table, share in zip(tables, shares, strict=True):
        for row in table:
            told = {name: row[name] for name in TOLD_APART if name in row}
            total = sums.setdefault(tuple(told.values()), dict.fromkeys(row, 0.0) | told)
            for name in row.keys() - told.keys():
                total[name] += share * row[name]
    return [{name: _figure(name, value) for name, value in total.items()} for total in sums.values()]


def _figure(name: str, value: Any) -> Any:
    if name in TOLD_APART:
        return value
    return max(0, round(value)) if name in COUNTED else max(0.0, value)


def widened(interval: Interval, error: float) -> Interval:
    """Return the interval of a first estimate: the plan's own, with the error of the first estimate."""
    return replace(interval, low=interval.low * (1 - error), high=interval.high * (1 + error))
