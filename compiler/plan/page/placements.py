"""What is cut over which axis of the mesh, grouped by how it is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from markupsafe import Markup

from recipec.compiler.plan.page.mesh import holders
from recipec.compiler.plan.page.numbers import gib, number
from recipec.compiler.plan.results import Placement, Plan
from recipec.compiler.wording import listing, plural

SHOWN = 6
"""Rows of a group that are shown before the rest is folded away."""


@dataclass(frozen=True)
class Dimension:
    """A dimension of an array and the axis that it is cut over, "" when it is whole."""

    size: str
    axis: str


@dataclass(frozen=True)
class Row:
    """Arrays with the same shape and sharding."""

    pattern: str
    count: str
    shape: list[Dimension]
    gib: str


@dataclass(frozen=True)
class Group:
    """Arrays that are cut over the same axes, largest first."""

    title: str
    pieces: str
    gib: str
    glyph: Markup
    shown: list[Row]
    folded: list[Row]


def groups(plan: Plan) -> list[Group]:
    """By the axes of more than one device that they are cut over; the group with most bytes first."""
    by_axes: dict[tuple[str, ...], list[Placement]] = {}
    for placement in plan.placements:
        axes = tuple(axis for axis, size in plan.axes.items() if size > 1 and axis in placement.spec)
        by_axes.setdefault(axes, []).append(placement)
    ordered = sorted(by_axes.items(), key=lambda item: -_bytes(item[1]))
    return [_group(plan, axes, placements) for axes, placements in ordered]


def _group(plan: Plan, axes: tuple[str, ...], placements: list[Placement]) -> Group:
    pieces = math.prod(plan.axes[axis] for axis in axes)
    each = plan.devices // pieces
    rows = [_row(plan, one) for one in sorted(placements, key=lambda one: -one.bytes)]
    return Group(
        title=f"Cut over {listing(axes)}" if axes else "Whole on every device",
        pieces=f"{plural(pieces, 'piece')}, each on {plural(each, 'device')}" if axes else "",
        gib=gib(_bytes(placements)),
        glyph=holders(plan, axes),
        shown=rows[:SHOWN] if len(rows) > SHOWN + 1 else rows,
        folded=rows[SHOWN:] if len(rows) > SHOWN + 1 else [],
    )


def _row(plan: Plan, placement: Placement) -> Row:
    spec = placement.spec + (None,) * (len(placement.shape) - len(placement.spec))
    return Row(
        pattern=placement.pattern,
        count=number(placement.count),
        shape=[
            Dimension(number(size), axis if axis and plan.axes.get(axis, 1) > 1 else "")
            for size, axis in zip(placement.shape, spec, strict=True)
        ],
        gib=gib(placement.bytes),
    )


def _bytes(placements: list[Placement]) -> float:
    return sum(one.bytes for one in placements)
