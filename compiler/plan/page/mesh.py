"""The mesh as a grid of devices, slice by slice, with its hosts and axes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from markupsafe import Markup

from recipec.compiler.plan.page.svg import line, picture, rectangle, tag, text
from recipec.compiler.plan.results import Plan
from recipec.compiler.wording import plural

ROWS = 16
"""Rows of a block, more where there are so many devices that it would get too wide."""
MOST_DRAWN = 512
"""Devices that are drawn one by one; slices are all alike."""


@dataclass(frozen=True)
class Grid:
    """Where the devices of an fsdp x tp mesh, or of a slice's part of it, are drawn.

    A device's index counts tp first. With tp the rows are fsdp and wrap into blocks side by side; with
    fsdp alone the devices are in reading order.

    Attributes:
        fsdp, tp: sizes.
    """

    fsdp: int
    tp: int

    @property
    def per_row(self) -> int:
        """Devices of a row, of one block."""
        if self.tp > 1:
            return self.tp
        if self.fsdp <= 8:
            return self.fsdp
        return max(8, 2 ** math.ceil(math.log2(math.sqrt(self.fsdp))))

    @property
    def block_rows(self) -> int:
        """Rows of a block; what follows goes into a block beside it."""
        return max(ROWS, 2 ** math.ceil(math.log2(math.sqrt(self.fsdp * self.tp))))

    @property
    def blocks(self) -> int:
        return math.ceil(self.fsdp / self.block_rows) if self.tp > 1 else 1

    @property
    def columns(self) -> int:
        return self.per_row * self.blocks

    @property
    def rows(self) -> int:
        return min(self.fsdp, self.block_rows) if self.tp > 1 else math.ceil(self.fsdp / self.per_row)

    def place(self, index: int) -> tuple[int, int]:
        """Column and row of a device."""
        row, column = divmod(index, self.per_row)
        block, row = divmod(row, self.block_rows) if self.tp > 1 else (0, row)
        return block * self.per_row + column, row

    def runs(self, first: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Devices that follow each other, as (column, row, columns, rows) of whole rectangles."""
        index, end = first, first + count
        while index < end:
            column, row = self.place(index)
            inside = index % self.per_row
            across = min(self.per_row - inside, end - index)
            down = 1
            if across == self.per_row:
                down = min((end - index) // self.per_row, self.rows - row)
            yield column, row, across, down
            index += across * down


@dataclass(frozen=True)
class Drawn:
    """A slice's picture with the line above it."""

    caption: str
    svg: Markup


def slices(plan: Plan) -> list[Drawn]:
    """The pictures, of as many slices as stay readable."""
    devices = plan.devices // plan.slices
    shown = max(1, min(plan.slices, MOST_DRAWN // devices))
    hosts = max(1, plan.hosts // plan.slices)
    out = []
    for number in range(shown):
        name = f"slice {number}: " if plan.slices > 1 else ""
        caption = f"{name}{plural(devices, 'device')}, {plural(hosts, 'host')}"
        out.append(Drawn(caption, _slice(plan, number, devices, hosts)))
    return out


def not_drawn(plan: Plan) -> str:
    """A sentence about the slices that are left out, "" when none is."""
    missing = plan.slices - len(slices(plan))
    return f"{plural(missing, 'more slice')} like this." if missing else ""


def holders(plan: Plan, axes: tuple[str, ...]) -> Markup:
    """A small mesh: which devices hold the same piece as the first one, when an array is cut over `axes`."""
    fsdp, tp = plan.axes.get("fsdp", 1), plan.axes.get("tp", 1)
    grid = Grid(fsdp, tp)
    cell = 64 / max(grid.columns, grid.rows, 4)
    gap = min(2, cell / 5)
    cells = []
    for index in range(fsdp * tp):
        column, row = grid.place(index)
        same = ("fsdp" not in axes or index // tp == 0) and ("tp" not in axes or index % tp == 0)
        cells.append(
            rectangle(column * cell, row * cell, cell - gap, cell - gap, "same" if same else "other")
        )
    sharing = fsdp * tp // math.prod(plan.axes.get(axis, 1) for axis in axes)
    each = " of each slice" if plan.slices > 1 else ""
    return picture(
        grid.columns * cell,
        grid.rows * cell,
        f"cut over {' and '.join(axes)}" if axes else "whole on every device",
        f"Filled: the {plural(sharing, 'device')}{each} that hold the first piece.",
        *cells,
        class_="holders",
    )


def _slice(plan: Plan, number: int, devices: int, hosts: int) -> Markup:
    tp = plan.axes.get("tp", 1)
    grid = Grid(devices // tp, tp)
    cell = next(size for size, most in ((68, 4), (38, 8), (20, 32), (12, 10_000)) if grid.columns <= most)
    left, top = (30, 30) if tp > 1 else (4, 30)
    gap = 5 if cell >= 30 else cell / 5
    gutter = 8 if grid.blocks > 1 else 0
    first = number * devices
    part = f"fsdp {grid.fsdp}"
    slice_of = f"dcn {number}, " if plan.slices > 1 else ""

    def at(column: float, row: float) -> tuple[float, float]:
        return left + column * cell + column // grid.per_row * gutter, top + row * cell

    drawn: list[Markup] = []
    for host in range(hosts):
        for column, row, across, down in grid.runs(host * (devices // hosts), devices // hosts):
            x, y = at(column, row)
            drawn.append(rectangle(x + 1.5, y + 1.5, across * cell - 3, down * cell - 3, "host"))
    for index in range(devices):
        column, row = grid.place(index)
        x, y = at(column, row)
        where = f"{slice_of}fsdp {index // tp}" + (f", tp {index % tp}" if tp > 1 else "")
        host = number * hosts + index // (devices // hosts)
        tip = f"device {first + index}: {where}, host {host}"
        size = cell - 2 * gap
        square = rectangle(x + gap, y + gap, size, size, "device")
        drawn.append(tag("g", square, tag("title", tip), class_="tip"))
        if cell >= 30:
            drawn.append(text(x + cell / 2, y + cell / 2 + 4, str(first + index), "middle", "index"))
    width = left + grid.columns * cell + (grid.blocks - 1) * gutter + 4
    height = top + grid.rows * cell + 4
    return picture(
        width,
        height,
        f"Devices of slice {number}" if plan.slices > 1 else "Devices of the mesh",
        f"{plural(devices, 'device')} as fsdp {grid.fsdp} by tp {tp}, on {plural(hosts, 'host')}.",
        *drawn,
        *_axes(grid, at, cell, left, part),
        class_="mesh",
    )


def _axes(
    grid: Grid, at: Callable[[float, float], tuple[float, float]], cell: int, left: float, part: str
) -> list[Markup]:
    """Brackets with each axis's name and size, in its colour; `part` is what is said of fsdp."""
    right, bottom = at(grid.per_row - 1, grid.rows - 1)
    across, kind = (f"tp {grid.tp}", "tp") if grid.tp > 1 else (part, "fsdp")
    if grid.tp == 1 and grid.rows > 1:
        across += ", row by row"
    drawn = [
        line(left, 22, right + cell, 22, f"bracket {kind}"),
        text(left, 14, across, class_=f"axis-name {kind}"),
    ]
    if grid.tp > 1:
        words = part + (", block by block" if grid.blocks > 1 else "")
        turned = tag(
            "text",
            words,
            transform="translate(14 30) rotate(-90)",
            text_anchor="end",
            class_="axis-name fsdp",
        )
        drawn += [line(22, 30, 22, bottom + cell, "bracket fsdp"), turned]
    return drawn
