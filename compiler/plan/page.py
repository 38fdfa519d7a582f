"""A plan as one HTML page: memory, time, roofline, mesh, search and serving, in figures and tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from recipec.compiler.pages.document import Block, Document, Facts, Figure, Items, Plot, Section, Table, Text
from recipec.compiler.pages.html import COLORS, GRAY, INK, SAID, axis, bar, rule, scatter, write
from recipec.compiler.pages.numbers import (
    GIB,
    NOT_KNOWN,
    capacity,
    flops,
    gib,
    hours,
    in_words,
    moved,
    ms,
    ms_per_token,
    number,
    percent,
    usd,
)
from recipec.compiler.plan.fit import yaml_lines
from recipec.compiler.plan.plan_text import STATUSES
from recipec.compiler.plan.results import Estimate, Memory, Placement, Plan, Point, Search
from recipec.compiler.wording import listing, mesh_axes, plural
from recipec.runtime.model.partition_rules import axes_of

NO_PRICE, NONE = "no price", "–"
MEMORY = {
    "weights": ("base weights", "the model as it is loaded"),
    "adapters": ("adapters", "what LoRA trains"),
    "optimizer": ("optimizer", "its state for what is trained"),
    "batch": ("batch", "tokens, positions and masks of a micro-batch"),
    "padding": ("padding", "what the arguments' layout in memory adds"),
    "temporaries": ("temporaries", "activations and everything else that lives within a step"),
    "code": ("code", "the program itself"),
}
"""Name and meaning by field of `Memory`, in the order in which they are drawn."""
MEANT = {
    "matrix products": "by the cycles of the tiling that libtpu chose",
    "other operations": "by its cycles as well: HBM or the vector unit limits them",
    "custom kernels": "from their shapes, by kernels that were measured",
    "exposed collectives": "the device waits for its links",
    "exposed copies": "the device waits for its memory, or for its host's",
}
"""The meaning of each part of a step."""
LANES = ("core", "kernel", "wait", "links", "memory", "host", "loop")
"""Rows of the timeline, from top to bottom."""
SHOWN, MOST_DRAWN, WAITS = 6, 512, 12
"""Rows of arrays that are shown before the rest is folded away; devices that are drawn at most, for equal
slices; transfers that are listed as waits."""


def page(plan: Plan, search: Search | None = None, serving: Sequence[tuple[str, Document]] = ()) -> str:
    """Return the page's HTML.

    Args:
        plan: the recipe's plan.
        search: the result of a search for better settings.
        serving: documents on serving, each with a title.

    Raises:
        ArtifactError: plotly is not installed.
    """
    estimate, memory = plan.estimate, plan.estimate.memory
    needed = (
        f"A device would need {gib(memory.used)} of HBM and has {capacity(memory.available)}: {left(memory)}."
    )
    served: list[Block] = []
    for title, shown in serving:
        served.append(Text(title, "heading"))
        for section in shown.sections:
            served += [Text(section.title, "heading")] if section.title else []
            served += section.blocks
    sections = [
        _memory(estimate),
        _time(estimate),
        _roofline(estimate),
        _mesh(plan),
        _collectives(plan),
        Section("run", "The run", (plan.run.note,), (_run(plan),)),
        *([_search(search)] if search else []),
        *(
            [Section("serving", "Serving", ("Planned from the recipe's serve; estimates too.",), served)]
            if served
            else []
        ),
        _basis(plan),
    ]
    return write(
        Document(
            title=f"Plan of {plan.recipe}",
            generator="recipec plan",
            command=("recipe plan", "estimate"),
            name=plan.recipe,
            hardware=_hardware(plan),
            figures=_figures(plan),
            sections=sections,
            alarms=[("It does not fit.", needed)] if memory.headroom < 0 else [],
            sentence="Estimates, from the compiler and not from a TPU."
            + (f" {estimate.interval.basis}" if estimate.seconds else ""),
        ),
        "plan",
    )


def _figures(plan: Plan) -> list[Figure]:
    """Return each figure as estimated, with its interval below it."""
    estimate, run, memory = plan.estimate, plan.run, plan.estimate.memory
    known = estimate.seconds > 0

    def figure(
        name: str, value: float | None, write: Callable[[float], str], inverse: bool = False
    ) -> Figure:
        if not value:
            return Figure(name, NOT_KNOWN, ())
        return Figure(name, write(value), (within(estimate, value, write, inverse),))

    step = figure("Step of a micro-batch", estimate.seconds, ms)
    cost = figure(f"Cost of the run{_bound(plan)}", run.usd, usd)
    used = (f"{gib(memory.used)} of {capacity(memory.available)}", left(memory))
    return [
        step if known else Figure(step.name, NOT_KNOWN, ("the compiler refused it",)),
        figure(_tokens(plan), run.tokens_per_second, number, True),
        figure("Model FLOPs utilisation", estimate.mfu, percent, True),
        Figure("HBM of a device", percent(memory.share), used, bad=memory.headroom < 0),
        figure(f"Run{_bound(plan)}", run.hours, hours),
        Figure(cost.name, NO_PRICE) if run.usd_per_hour is None else cost,
    ]


def within(estimate: Estimate, value: float, write: Callable[[float], str], inverse: bool = False) -> str:
    """Return the interval of a figure that is proportional to the step's time, or to its inverse."""
    low, high = estimate.interval.of(1.0)
    ends = (value / high, value / low) if inverse else (value * low, value * high)
    return " to ".join(map(write, ends))


def _hardware(plan: Plan) -> list[tuple[str, str]]:
    slices = f"{plural(plan.slices, 'slice')} of " if plan.slices > 1 else ""
    return [
        ("Model", plan.model),
        ("Accelerator", plan.accelerator),
        ("Topology", f"{slices}{plan.topology}"),
        ("Devices", f"{plural(plan.devices, 'device')} on {plural(plan.hosts, 'host')}"),
        ("Mesh", mesh_axes(plan.axes)),
        ("Step of", plan.script),
    ]


def _tokens(plan: Plan) -> str:
    """Name the unit of tokens a second: without the data, rows count as full."""
    return "Real tokens a second" if plan.run.source == "data" else "Tokens a second, at most"


def _bound(plan: Plan) -> str:
    """Return the words for figures that are upper limits."""
    return ", at most" if plan.run.source == "bound" else ""


def left(memory: Memory) -> str:
    """Return the headroom in words: "22.5 GiB free", "33.7 GiB too much"."""
    return f"{gib(abs(memory.headroom))} {'too much' if memory.headroom < 0 else 'free'}"


def _memory(estimate: Estimate) -> Section:
    memory, end = estimate.memory, estimate.memory.available / GIB
    sizes = [(*words, getattr(memory, field)) for field, words in MEMORY.items()]
    missing = memory.headroom < 0
    sums = [("used", "", memory.used), ("missing" if missing else "headroom", "", abs(memory.headroom))]
    rows = [
        (name, gib(size), percent(size / memory.available), in_words(size), meaning)
        for name, meaning, size in [*sizes, *sums]
    ]
    data = [
        bar(
            name,
            [size / GIB],
            [""],
            color,
            orientation="h",
            said=[f"{name}: {amount}, {share} of the device"],
        )
        for (name, _, size), (_, amount, share, *_), color in zip(sizes, rows, COLORS, strict=False)
    ]
    rules = [rule(end, f"the device has {capacity(memory.available)}")]
    if missing:
        rules.append(rule(memory.used / GIB, left(memory), 1, COLORS[7]))
    layout = {
        "barmode": "stack",
        "xaxis": axis("GiB", range=[0, max(memory.used / GIB, end) * 1.01]),
        "yaxis": {"visible": False},
        "margin": {"l": 8, "r": 12, "t": 46, "b": 140},
        "shapes": [shape for shape, _ in rules],
        "annotations": [note for _, note in rules],
    }
    head = ("part", "HBM", "of the device", "bytes", "what it is")
    parts = Table(head, rows, words=(4,), label="HBM by part", bad=(len(rows) - 1,) if missing else ())
    blocks: list[Any] = [Plot("memory-parts", "", data, layout, 320, after=(parts,))]
    if estimate.largest:
        largest = [(one.name, one.shape, number(one.count), gib(one.bytes)) for one in estimate.largest]
        alive = "Alive when the temporaries take most memory. Arrays of all layers together."
        where = Table(("where it comes from", "shape", "arrays", "HBM"), largest, words=(1,))
        blocks += [Text("The largest temporaries", "heading"), Text(alive), where]
    against = f"HBM of one device by part, against the {capacity(memory.available)} that it has."
    return Section("memory", "Memory", (against,), blocks)


def _time(estimate: Estimate) -> Section:
    rows = f"{number(estimate.rows)} rows, {number(estimate.row_length)} tokens each"
    aside = (f"One micro-batch of {rows}.",)
    if not estimate.seconds:
        refused = Text("The compiler refused the step, and gives no time for what does not fit.", "")
        return Section("time", "Time", aside, (refused,))
    found = estimate.timeline.parts.items()
    parts = [(name, MEANT[name], seconds) for name, seconds in found if seconds]
    peak = estimate.model_flops / estimate.peak_flops
    drawn = [
        *(
            (name, "estimate", seconds, color)
            for (name, _, seconds), color in zip(parts, COLORS, strict=False)
        ),
        ("the model's FLOPs at the peak", "at the peak", peak, GRAY),
    ]
    data = [
        bar(name, [seconds * 1e3], [row], color, orientation="h", said=[f"{name}: {ms(seconds)}"])
        for name, row, seconds, color in drawn
    ]
    layout = {
        "barmode": "stack",
        "xaxis": axis("ms"),
        "yaxis": {"autorange": "reversed"},
        "margin": {"l": 80, "r": 12, "t": 8, "b": 160},
    }
    sums = [("estimate", within(estimate, estimate.seconds, ms), estimate.seconds)]
    table = Table(
        ("part", "time", "of the step", "what it is"),
        [(name, ms(one), percent(one / estimate.seconds), what) for name, what, one in [*parts, *sums]],
        words=(3,),
        label="Time by part",
    )
    needs = (
        f"The model needs {flops(estimate.model_flops, 'FLOP')} of a device, recomputation not counted: at "
        f"the peak of {flops(estimate.peak_flops, 'FLOP/s')} that is {ms(peak)}, {percent(estimate.mfu)} of "
        "the estimate."
    )
    plot = Plot("time-parts", "", data, layout, 370, after=(table,))
    return Section(
        "time", "Time", aside, (plot, Text(needs), *_waits(estimate), *_worked(estimate), *_drawn(estimate))
    )


def _waits(estimate: Estimate) -> Iterator[Any]:
    """Return the transfers that the device waits for, by weight."""
    found = [one for one in estimate.timeline.transfers if one.exposed]
    if not found:
        return
    rows = [
        (one.kind, one.name, number(one.count), moved(one.bytes), ms(one.seconds), ms(one.exposed))
        for one in found[:WAITS]
    ]
    yield Text("What the device waits for", "heading")
    yield Text("Transfers of all layers together, those first for which it waits longest.")
    head = ("kind", "weight or operation", "times", "bytes", "takes", "exposed")
    yield Table(head, rows, words=(1,), label="Exposed transfers")


def _worked(estimate: Estimate) -> Iterator[Any]:
    """Return the operations that the device works on longest, by name."""
    found = estimate.timeline.operations[:WAITS]
    if not found:
        return
    rows = [
        (one.name, "products" if one.products else "other", number(one.count), ms(one.seconds))
        for one in found
    ]
    yield Text("What the device works on", "heading")
    yield Text("Operations of all layers together, the longest first.")
    yield Table(("weight and operation", "kind", "times", "takes"), rows, words=(0,), label="Longest work")


def _drawn(estimate: Estimate) -> Iterator[Any]:
    """Draw the timeline of the compile with most layers, one row for each lane that works in parallel."""
    spans = estimate.timeline.spans
    lanes = [lane for lane in LANES if any(span.lane == lane for span in spans)]
    if not lanes:
        return
    data = [
        bar(
            lane,
            [span.seconds * 1e3 for span in spans if span.lane == lane],
            [lane for span in spans if span.lane == lane],
            COLORS[LANES.index(lane)],
            orientation="h",
            base=[span.start * 1e3 for span in spans if span.lane == lane],
            said=[f"{span.name or lane}: {ms(span.seconds)}" for span in spans if span.lane == lane],
        )
        for lane in lanes
    ]
    layout = {
        "barmode": "overlay",
        "xaxis": axis("ms"),
        "yaxis": {"autorange": "reversed"},
        "margin": {"l": 80, "r": 12, "t": 8, "b": 60},
        "showlegend": False,
    }
    yield Text("The step as it is scheduled", "heading")
    yield Text("Bars in one column run at the same time. Short ones are drawn as one.")
    yield Plot("timeline", "", data, layout, 60 + 45 * len(lanes))


def points(estimate: Estimate) -> list[tuple[str, int, float, float, float]]:
    """Return (name, count, FLOPs, bytes, seconds) of the step and each kind of kernel, if none is 0."""
    done = estimate.flops + sum(kernel.flops for kernel in estimate.kernels)
    count = estimate.bytes + sum(kernel.bytes for kernel in estimate.kernels)
    found = [
        ("the whole step", 1, done, count, estimate.seconds),
        *((one.name, one.count, one.flops, one.bytes, one.seconds) for one in estimate.kernels),
    ]
    return [one for one in found if min(one[2:]) > 0]


def _roofline(estimate: Estimate) -> Section:
    shown, peak, bandwidth = points(estimate), estimate.peak_flops, estimate.bandwidth
    ridge = peak / bandwidth
    marks = [chr(ord("a") + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(len(shown))]
    x = [done / size for _, _, done, size, _ in shown]
    y = [done / seconds / 1e12 for _, _, done, _, seconds in shown]
    ends = [min([ridge, *x]) / 8, ridge, max([ridge, *x]) * 4]
    roof = [ends[0] * bandwidth / 1e12, peak / 1e12, peak / 1e12]
    named = f"peak {flops(peak, 'FLOP/s')}, HBM {number(bandwidth / 1e9)} GB/s"
    low = [min(roof + y), peak / 1e12]
    data = [
        scatter(named, ends, roof, INK, hoverinfo="skip"),
        scatter(f"ridge, {number(ridge)} FLOP a byte", [ridge] * 2, low, INK, dash="dot", hoverinfo="skip"),
    ]
    whole = [one[0].startswith("the whole") for one in shown]
    for name, of_step, color, symbol in (
        ("step", True, COLORS[0], "circle"),
        ("kernels", False, COLORS[3], "diamond"),
    ):
        which = [i for i in range(len(shown)) if whole[i] == of_step]
        said = [f"{shown[i][0]}: {x[i]:,.0f} FLOP a byte, {flops(y[i] * 1e12, 'FLOP/s')}" for i in which]
        at = [[values[i] for i in which] for values in (x, y, marks)]
        more = {"text": at[2], "textposition": "bottom center", "said": said, "symbol": symbol, "size": 11}
        data += [scatter(name, at[0], at[1], color, "markers+text", **more)] if which else []
    layout = {
        "xaxis": axis("FLOP a byte of HBM traffic", type="log", dtick="D2"),
        "yaxis": axis("TFLOP/s", type="log", dtick="D2"),
        "margin": {"l": 56, "r": 12, "t": 12, "b": 150},
    }
    rows = [
        (
            *(mark, name, number(count), flops(done, "FLOP"), moved(size), number(done / size)),
            *(ms(seconds), flops(done / seconds, "FLOP/s"), percent(done / seconds / peak)),
        )
        for mark, (name, count, done, size, seconds) in zip(marks, shown, strict=True)
    ]
    kernels = (
        " The kernels are added from their shapes, and their times are those of kernels that were measured."
    )
    step = (
        f"The step has {flops(estimate.flops, 'FLOP')} and {moved(estimate.bytes)} by the compiled "
        f"program, loops counted in full.{kernels if estimate.kernels else ''}"
    )
    head = ("", "what", "times", "FLOPs", "HBM traffic", "FLOP a byte", "time", "speed", "of the peak")
    table = Table(head, rows, words=(1,), label="Points of the roofline")
    after = (table, Text(step)) if rows else (Text("There is no time to draw a point with.", ""),)
    aside = (
        "What a device reaches at the estimated times, against its peak and its memory's bandwidth.",
        f"To the left of the ridge, at {number(ridge)} FLOP a byte, memory is the limit.",
    )
    return Section(
        "roofline", "Roofline", aside, (Plot("roofline-points", "", data, layout, 490, after=after),)
    )


def grid(fsdp: int, tp: int) -> int:
    """Return the columns of the grid of a slice's devices: the size of tp, or enough for about a square."""
    return tp if tp > 1 else fsdp if fsdp <= 8 else 2 ** math.ceil(math.log2(math.sqrt(fsdp)))


def _mesh(plan: Plan) -> Section:
    axes = ", ".join(f"{axis} {size}" for axis, size in plan.axes.items())
    place = "dcn and fsdp" if "dcn" in plan.axes else "fsdp"
    aside = (
        f"{axes}. Each row of a micro-batch is computed by one place of {place}.",
        "A host's devices have one color, the next one's another. They are numbered in the mesh's order; "
        "which chip of the torus each one is, is JAX's choice.",
    )
    devices, hosts = plan.devices // plan.slices, max(1, plan.hosts // plan.slices)
    drawn = max(1, min(plan.slices, MOST_DRAWN // devices))
    blocks: list[Any] = [_slice(plan, number, devices, hosts) for number in range(drawn)]
    if plan.slices > drawn:
        blocks.append(Text(f"{plural(plan.slices - drawn, 'more slice')} like this."))
    if plan.slices > 1:
        joined = "Slices are joined over the data center's network (DCN)"
        blocks.append(Text(f"{joined}; each holds all weights, and computes rows of its own."))
    by_axes: dict[tuple[str, ...], list[Placement]] = {}
    for placement in plan.placements:
        over = {name for axis in placement.spec for name in _split_over(plan, axis)}
        cut = tuple(axis for axis in plan.axes if axis in over)
        by_axes.setdefault(cut, []).append(placement)
    for cut, found in sorted(by_axes.items(), key=lambda one: -sum(placement.bytes for placement in one[1])):
        pieces = math.prod(plan.axes[axis] for axis in cut)
        each = (
            f"{plural(pieces, 'piece')}, each on {plural(plan.devices // pieces, 'device')}; " if cut else ""
        )
        blocks += [
            Text(f"Cut over {listing(cut)}" if cut else "Whole on every device", "heading"),
            Text(f"{each}{gib(sum(one.bytes for one in found))} a device"),
            *_placed(plan, sorted(found, key=lambda one: -one.bytes)),
        ]
    return Section("mesh", "Mesh", aside, blocks)


def _split_over(plan: Plan, axis: str | None) -> tuple[str, ...]:
    """Return the mesh axes with more than one device that an axis in a sharding stands for."""
    return tuple(name for name in axes_of(axis, plan.axes) if plan.axes[name] > 1)


def _slice(plan: Plan, index: int, devices: int, hosts: int) -> Plot:
    """Return a slice's devices, row by row. With tp, devices of a row share their place on the other axes."""
    tp = plan.axes.get("tp", 1)
    within = {
        axis: size for axis, size in plan.axes.items() if axis == "fsdp" or (axis != "dcn" and size > 1)
    }
    others = {axis: size for axis, size in within.items() if axis != "tp"}
    columns = grid(devices // tp, tp)
    lines = [range(first, min(first + columns, devices)) for first in range(0, devices, columns)]
    dcn = f"dcn {index}, " if plan.slices > 1 else ""

    def host(device: int) -> int:
        return index * hosts + device // (devices // hosts)

    def said(device: int) -> str:
        places, rest = [], device
        for name, size in reversed(within.items()):
            places.append(f"{name} {rest % size}")
            rest //= size
        where = f"{dcn}{', '.join(reversed(places))}"
        return f"device {index * devices + device}: {where}, host {host(device)}"

    data = {
        "type": "heatmap",
        "z": [[host(device) % 2 for device in line] for line in lines],
        "text": [[str(index * devices + device) for device in line] for line in lines],
        "customdata": [[said(device) for device in line] for line in lines],
        "texttemplate": "%{text}" if columns <= 16 else "",
        "hovertemplate": SAID,
        "textfont": {"color": "white"},
        "colorscale": [[0, COLORS[0]], [1, COLORS[2]]],
        **{"zmin": 0, "zmax": 1, "showscale": False, "xgap": 2, "ygap": 2},
    }
    bare = {"showticklabels": False, "ticks": "", "showgrid": False, "zeroline": False}
    rows = " x ".join(f"{axis} {size}" for axis, size in others.items())
    across, down = (f"tp {tp}", rows) if tp > 1 else (f"{rows}{', row by row' if len(lines) > 1 else ''}", "")
    layout = {
        "xaxis": axis(across, **bare),
        "yaxis": axis(down, autorange="reversed", **bare),
        "margin": {"l": 32, "r": 8, "t": 8, "b": 32},
    }
    name = f"slice {index}: " if plan.slices > 1 else ""
    title = f"{name}{plural(devices, 'device')}, {plural(hosts, 'host')}"
    return Plot(f"slice-{index}", title, [data], layout, min(640, 60 + 26 * len(lines)))


def _placed(plan: Plan, found: Sequence[Placement]) -> list[Table]:
    """List a group's arrays with the axis that shards each dimension; small arrays are folded away."""

    def shape(one: Placement) -> str:
        spec = one.spec + (None,) * (len(one.shape) - len(one.spec))
        sizes = zip(one.shape, spec, strict=True)
        return " × ".join(
            " ".join([number(size), " x ".join(_split_over(plan, axis))]).rstrip() for size, axis in sizes
        )

    rows = tuple((one.pattern, number(one.count), shape(one), gib(one.bytes)) for one in found)
    shown = SHOWN if len(rows) > SHOWN + 1 else len(rows)
    head = ("arrays", "count", "shape and axis", "a device")
    tables = [Table(head, rows[:shown], words=(2,))]
    return tables + (
        [Table(head, rows[shown:], words=(2,), folded=f"{len(rows) - shown} smaller")] if rows[shown:] else []
    )


def _collectives(plan: Plan) -> Section:
    estimate, between = plan.estimate, " or between slices (DCN)" if plan.slices > 1 else ""
    aside = (
        f"What devices exchange within a micro-batch, over the chips' own links (ICI){between}.",
        "What the device waits for them is a part of its estimated time; the rest is hidden behind its work.",
    )
    rows = tuple(
        (
            one.kind,
            listing(one.axes) or "of no axes",
            "DCN" if one.over_dcn else "ICI",
            number(one.count),
            moved(one.bytes),
        )
        for one in sorted(estimate.collectives, key=lambda one: -one.bytes)
    )
    none = (
        "The compiled step has none."
        if estimate.seconds
        else "The compiler refused the step, and shows none."
    )
    table = Table(
        ("kind", "axes", "network", "times", "arrives at a device"), rows, words=(1, 2), label="Collectives"
    )
    return Section("collectives", "Collectives", aside, (table if rows else Text(none, ""),))


def _run(plan: Plan) -> Table:
    """Return the estimate and interval of each figure of the whole run; "" where it has none."""
    estimate, run = plan.estimate, plan.run
    known, counted, bound = run.tokens_per_second > 0, run.source == "data", _bound(plan)
    million = run.usd_per_million_tokens

    def around(value: float | None, write: Callable[[float], str], inverse: bool = False) -> str:
        return within(estimate, value, write, inverse) if value else ""

    rows = [
        (f"Optimizer steps{bound}", number(run.steps), ""),
        ("Micro-batches a step", number(run.micro_batches), ""),
        ("Rows of a micro-batch", f"{number(estimate.rows)} of {number(estimate.row_length)} tokens", ""),
        ("Real tokens a row" if counted else "Tokens a row, at most", number(run.tokens_per_row), ""),
        (
            _tokens(plan),
            number(run.tokens_per_second) if known else NOT_KNOWN,
            around(run.tokens_per_second, number, True),
        ),
        (f"Time{bound}", hours(run.hours), around(run.hours, hours)),
        ("Price an hour", NO_PRICE if run.usd_per_hour is None else usd(run.usd_per_hour), ""),
        (
            "A million real tokens" if counted else "A million tokens, at least",
            usd(million),
            around(million, usd),
        ),
        (f"Cost{bound}", usd(run.usd), around(run.usd, usd)),
    ]
    return Table(("", "estimate", "within"), tuple(rows), label="The run")


def _search(search: Search) -> Section:
    others = [index for index in range(len(search.points)) if index not in search.front]

    def order(index: int) -> tuple[int, float]:
        point = search.points[index]
        place = STATUSES.index(point.status) if point.status in STATUSES else len(STATUSES)
        return place, point.seconds_per_token or point.bound_seconds_per_token

    def sets(index: int) -> str:
        point = search.points[index]
        stands = ("as it stands",) if index == search.baseline or not point.sets else ()
        return ", ".join([*point.sets, *stands])

    def said(value: str) -> str:
        return NONE if value == NOT_KNOWN else value

    def share(point: Point) -> str:
        return said(percent(point.memory.share if point.memory else None))

    front = [
        (
            str(place),
            sets(index),
            said(ms_per_token(point.seconds_per_token)),
            said(ms(point.step_seconds)),
            said(ms(point.exposed_seconds)),
            share(point),
            said(usd(point.usd_per_million_tokens)),
            said(percent(point.mfu)),
        )
        for place, index in enumerate(search.front, start=1)
        for point in (search.points[index],)
    ]
    behind = [
        (
            sets(index),
            said(ms_per_token(point.seconds_per_token)),
            said(ms_per_token(point.bound_seconds_per_token or None)),
            share(point),
            f"{point.status}: {point.reason}" if point.reason else point.status,
        )
        for index in sorted(others, key=order)
        for point in (search.points[index],)
    ]
    blocks: list[Any] = [*_front(search)]
    if lines := best(search):
        blocks += [Text("The fastest, as lines of the recipe", "heading"), Text(lines, "code")]
    if front:
        head = ("", "settings", "ms a token", "step", "waits", "HBM", "a million tokens", "MFU")
        waits = "Waits: what the device waits for collectives and copies, a part of the step."
        blocks += [Text("The front", "heading"), Table(head, front, waits, (1,), "The search's front")]
    if behind:
        others_head = ("settings", "ms a token", "at least", "HBM", "result")
        blocks.append(Table(others_head, behind, words=(4,), folded=f"{len(behind)} not on the front"))
    return Section(
        "search", "Search", (f"{counts(search)}.", gain(search)), [*blocks, *map(Text, search.notes)]
    )


def _front(search: Search) -> list[Plot]:
    """Plot time per token against HBM, for the points that have both."""
    where = {
        index: (point.memory.share * 100, point.seconds_per_token * 1e3)
        for index, point in enumerate(search.points)
        if point.memory and point.seconds_per_token
    }
    front = sorted((index for index in search.front if index in where), key=lambda index: where[index])
    stands = [index for index in (search.baseline,) if index in where]
    data = []
    for name, which, mode, color, size, symbol in (
        ("behind the front", [i for i in where if i not in front], "markers", GRAY, 8, "circle"),
        ("on the front", front, "lines+markers+text", COLORS[0], 20, "circle"),
        ("the recipe as it stands", stands, "markers", COLORS[3], 28, "circle-open"),
    ):
        x, y = ([where[i][one] for i in which] for one in (0, 1))
        text = [str(search.front.index(i) + 1) if i in front else "" for i in which]
        more = {"text": text, "textfont": {"color": "white"}, "size": size, "symbol": symbol}
        said = [settings(search.points[i]) for i in which]
        data += [scatter(name, x, y, color, mode, said=said, **more)] if which else []
    shape, words = rule(100, "all of the HBM")
    layout = {
        "xaxis": axis("HBM of a device, %", range=[0, max([100, *(x for x, _ in where.values())]) * 1.04]),
        "yaxis": axis("ms a real token", rangemode="tozero"),
        "shapes": [shape],
        "annotations": [words],
        "margin": {"l": 60, "r": 12, "t": 30, "b": 120},
    }
    numbered = "Numbered: no other configuration is better in time, HBM and cost at once."
    note = Text(f"{numbered} Gray: compiled, and behind the front.")
    return [Plot("front", "", data, layout, 470, after=(note,))] if data else []


def settings(point: Point) -> str:
    """Describe in one line what a configuration changes, and its figures."""
    share = percent(point.memory.share if point.memory else None)
    return (
        f"{', '.join(point.sets) or 'the recipe as it stands'}: {ms_per_token(point.seconds_per_token)} ms "
        f"a token, {share} of the HBM, {usd(point.usd_per_million_tokens)} a million tokens"
    )


def counts(search: Search) -> str:
    """Count the configurations by status: "14 configurations: 10 compiled, 1 too large"."""
    found = Counter(point.status for point in search.points)
    words = ", ".join(f"{found[status]} {status}" for status in STATUSES if found[status])
    return f"{len(search.points):,} configurations: {words}"


def gain(search: Search) -> str:
    """Compare the fastest configuration with the unchanged recipe, in a sentence."""
    if not search.front:
        return "No configuration fits."
    if search.baseline is None:
        return "The recipe as it stands has no estimate."
    if search.front[0] == search.baseline:
        return "The recipe as it stands is the fastest."
    fastest, stands = (search.points[i].seconds_per_token for i in (search.front[0], search.baseline))
    if not fastest or not stands:
        return ""
    return f"The fastest has {stands / fastest:.2f} times the tokens a second of the recipe as it stands."


def best(search: Search) -> str:
    """Return the recipe lines of the fastest configuration, "" when the recipe has them already."""
    return "\n".join(yaml_lines(search.points[search.front[0]].sets)) if search.front else ""


def _basis(plan: Plan) -> Section:
    """Explain what is estimated, and from what."""
    estimate = plan.estimate
    layers = plural(estimate.layers, "layer")
    whole = f"All {layers} were compiled to the end."
    if estimate.compiled_layers != (estimate.layers,):
        whole = f"All {layers} were scheduled, {estimate.compiled_layers[0]} were compiled to the end."
    came = ", and this plan came from the cache." if plan.cached else f", this plan {plan.seconds:,.0f} s."
    sentences = [
        "Everything on this page is an estimate: libtpu compiled the training step on a machine without a "
        "TPU. Nothing was measured on one.",
        whole,
        "Bytes, FLOPs and times are those of one device and one micro-batch, forward, backward and the "
        "optimizer's update.",
        f"Compiling took {estimate.compile_seconds:,.0f} s{came}",
        *plan.notes,
    ]
    facts = (Facts(plan.settings.items(), "Settings"), Facts(plan.versions.items(), "Versions"))
    return Section("basis", "What this rests on", (), (Items(sentences), *facts))
