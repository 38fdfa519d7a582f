"""`recipe cost`: compute the cost of training and serving, and say where each figure comes from.

Money is computed in decimals and rounded once, at the end, so that sums do not drift by a cent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import TYPE_CHECKING

from pydantic import ConfigDict, TypeAdapter

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.prices import MachinePrice, exact, machine_price, serving_price
from recipec.compiler.pages.document import Document, Table, Text, sheet
from recipec.compiler.plan.run_hours import Hours, check_hours

if TYPE_CHECKING:
    from recipec.compiler.lowering.program import Program

SERVED_HOURS = (1.0, 24.0)
"""Hours of serving that the table always shows, besides those of --serve-hours."""
CENT = Decimal("0.01")
ANY_SIZE = Context(prec=700)
"""A context with enough digits for every price and number of hours. With the usual 28 digits, quantizing a
larger amount fails."""


@dataclass(frozen=True)
class CostLine:
    """One line of the table, in US$ rounded to cents.

    Attributes:
        trained: whether the training is counted.
        serve_hours: hours of serving; 0 for training alone.
        usd: the cost of this recipe.
        baseline_usd, ratio: the cost of the baseline, and that cost divided by this recipe's; None without a
            baseline. The ratio is also None if this recipe costs nothing.
    """

    trained: bool
    serve_hours: float
    usd: float
    baseline_usd: float | None
    ratio: float | None


@dataclass(frozen=True)
class Cost:
    """The costs of a recipe.

    Attributes:
        recipe: its name.
        train_hours, train_usd_per_hour: of this recipe.
        serve_usd_per_hour: None when the recipe serves nothing.
        sources: the origin of each figure, by its name in the table.
        baseline: the baseline's name, None without one.
        baseline_hours, baseline_train_usd_per_hour, baseline_serve_usd_per_hour: as the recipe gives them.
        rows: training alone, serving alone by its hours, both.
        notes: sentences.
    """

    __pydantic_config__ = ConfigDict(defer_build=True)  # few commands read or write it

    recipe: str
    train_hours: float
    train_usd_per_hour: float
    serve_usd_per_hour: float | None
    sources: dict[str, str]
    baseline: str | None
    baseline_hours: float | None
    baseline_train_usd_per_hour: float | None
    baseline_serve_usd_per_hour: float | None
    rows: tuple[CostLine, ...]
    notes: tuple[str, ...]


COST: TypeAdapter[Cost] = TypeAdapter(Cost)
"""Converts a Cost to and from JSON."""


def cost(program: Program, training: Hours, hours: float | None = None) -> Cost:
    """Compute the costs of a recipe.

    Args:
        training: the result of `compiler.plan.run_hours.training_hours`.
        hours: hours of serving, in addition to 1 and 24; None for no others.

    Raises:
        ArtifactError: a price is not known, or hours are invalid.
    """
    baseline = program.recipe.cost.baseline
    train, serve = _required_prices(program)
    check_hours(hours, "--serve-hours")
    served = sorted({*SERVED_HOURS, *([hours] if hours else [])}) if serve else []
    inputs = (exact(training.hours), train.usd_per_hour, serve.usd_per_hour if serve else Decimal(0))
    other = None
    if baseline is not None:
        other = (
            exact(baseline.train_hours),
            exact(baseline.train_usd_per_hour),
            exact(baseline.serve_usd_per_hour),
        )
    notes = []
    if serve is None:
        notes.append("the recipe has no section `serve`, so the cost is that of training")
    if program.recipe.launch.spot and program.recipe.cost.train_usd_per_hour is None:
        notes.append("spot capacity costs less than the list price that is used here")
    return Cost(
        recipe=program.name,
        train_hours=training.hours,
        train_usd_per_hour=float(train.usd_per_hour),
        serve_usd_per_hour=float(serve.usd_per_hour) if serve else None,
        sources={
            "training hours": training.source,
            "training price": train.source,
            **({"serving price": serve.source} if serve else {}),
        },
        baseline=baseline.name if baseline else None,
        baseline_hours=baseline.train_hours if baseline else None,
        baseline_train_usd_per_hour=baseline.train_usd_per_hour if baseline else None,
        baseline_serve_usd_per_hour=baseline.serve_usd_per_hour if baseline else None,
        rows=(
            _row(inputs, other, True, 0.0),
            *(_row(inputs, other, trained, hour) for trained in (False, True) for hour in served),
        ),
        notes=tuple(notes),
    )


def document(cost: Cost) -> Document:
    """Return the costs as a document: the table, and the origin of each figure."""
    names = [cost.recipe, *([cost.baseline, "ratio"] if cost.baseline else [])]
    origins = list(_origins(cost))
    notes = [f"ratio: what {cost.baseline} costs over what {cost.recipe} costs"] if cost.baseline else []
    return sheet(
        "",
        [Table(("US$", *names), [_cells(cost, row) for row in cost.rows])],
        [
            Table((), origins, words=range(1, len(origins[0]))),
            *(Text(note) for note in (*notes, *cost.notes)),
        ],
    )


def _cells(cost: Cost, row: CostLine) -> list[str]:
    what = ["training"] if row.trained else []
    what += [f"{row.serve_hours:g} h of serving"] if row.serve_hours else []
    cells = [" and ".join(what), f"{row.usd:,.2f}"]
    if row.baseline_usd is not None:
        cells += [f"{row.baseline_usd:,.2f}", "-" if row.ratio is None else f"{row.ratio:.2f}"]
    return cells


def _origins(cost: Cost) -> Iterator[list[str]]:
    """Yield the inputs as rows: this recipe's value, the baseline's value, and the origin of the former."""
    other = (
        ("training hours", f"{cost.train_hours:.2f} h", cost.baseline_hours, "{:.2f} h"),
        (
            "training price",
            f"US$ {cost.train_usd_per_hour:.2f}/h",
            cost.baseline_train_usd_per_hour,
            "US$ {:.2f}/h",
        ),
        (
            "serving price",
            f"US$ {cost.serve_usd_per_hour or 0:.2f}/h",
            cost.baseline_serve_usd_per_hour,
            "US$ {:.2f}/h",
        ),
    )
    for name, value, theirs, form in other:
        if name in cost.sources:
            compared = [] if theirs is None else [f"{cost.baseline}: {form.format(theirs)}"]
            yield [name, value, *compared, cost.sources[name]]


def _required_prices(program: Program) -> tuple[MachinePrice, MachinePrice | None]:
    usd_per_hour = program.recipe.cost.train_usd_per_hour
    train, serve = machine_price(usd_per_hour, program.accelerator), serving_price(program)
    if train is None:
        raise ArtifactError(
            f"the price of {program.accelerator.name} is not in the catalog",
            "set cost.train_usd_per_hour in the recipe, or with --set cost.train_usd_per_hour=16.80",
        )
    if program.serve_accelerator is not None and serve is None:
        raise ArtifactError(
            f"the price of {program.serve_accelerator.name} is not in the catalog",
            "set cost.serve_usd_per_hour in the recipe, or with --set cost.serve_usd_per_hour=21.52",
        )
    return train, serve


Inputs = tuple[Decimal, Decimal, Decimal]
"""Hours of training, price of training per hour, price of serving per hour."""


def _row(inputs: Inputs, other: Inputs | None, trained: bool, served: float) -> CostLine:
    ours = _total(inputs, trained, served)
    theirs = None if other is None else _total(other, trained, served)
    return CostLine(
        trained=trained,
        serve_hours=served,
        usd=float(_cents(ours)),
        baseline_usd=None if theirs is None else float(_cents(theirs)),
        ratio=None if theirs is None or not ours else float(theirs / ours),
    )


def _total(inputs: Inputs, trained: bool, served: float) -> Decimal:
    hours, train, serve = inputs
    return (hours * train if trained else Decimal(0)) + exact(served) * serve


def _cents(amount: Decimal) -> Decimal:
    return amount.quantize(CENT, ROUND_HALF_UP, ANY_SIZE)
