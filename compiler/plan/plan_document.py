"""A plan as one document: memory, time, roofline, mesh, collectives, the run, search and serving.

`recipe plan` prints it without its details, within a terminal; --html writes all of it as a page with plots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from recipec.compiler.pages.document import (
    Block,
    Document,
    Excerpt,
    Facts,
    Figure,
    Items,
    Plot,
    Section,
    Table,
    Text,
)
from recipec.compiler.pages.html import COLORS, GRAY, INK, SAID, axis, bar, rule, scatter
from recipec.compiler.pages.numbers import (
    GIB,
    NOT_KNOWN,
    capacity,
    duration,
    flops,
    gb_number,
    gib,
    hours,
    in_words,
    moved,
    ms,
    number,
    percent,
    usd,
)
from recipec.compiler.plan.first_estimate import EXPERTS_MEMORY_ERROR, MEMORY_ERROR
from recipec.compiler.plan.results import Estimate, Generation, Interval, Memory, Placement, Plan, Search
from recipec.compiler.plan.search_document import ESTIMATES, search_section
from recipec.compiler.wording import listing, mesh_axes, plural
from recipec.runtime.model.partition_rules import axes_of

NO_PRICE = "no price"
MEMORY = {
    "weights": ("base weights", "the model as it is loaded"),
    "adapters": ("adapters", "what LoRA trains"),
    "optimizer": ("optimizer", "its state for what is trained"),
    "batch": ("batch", "tokens, positions and masks of a micro-batch"),
    "padding": ("padding", "what the arguments' layout in memory adds"),
    "temporaries": ("activations and temporaries", "everything that lives only within a step"),
    "code": ("code", "the program itself"),
    "rollout": ("rollout weights", "the frozen weights again, in the layout of rollouts"),
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
EXPOSED, WORKED, COLLECTIVES, TEMPORARIES = 4, 4, 4, 2
"""Rows of each table that a terminal shows."""
ROUNDED = 1e-6
"""Share of a step below which the difference from the sum of its parts is rounding."""


def document(
    plan: Plan, search: Search | None = None, serving: Sequence[tuple[str, Document]] = ()
) -> Document:
    """Return the document.

    Args:
        plan: the recipe's plan.
        search: the result of a search for better settings.
        serving: documents on serving, each with a title.
    """
    estimate, memory = plan.estimate, plan.estimate.memory
    needed = (
        f"A device would need {gib(memory.used)} of HBM and has {capacity(memory.available)}: {left(memory)}."
    )
    searched = [] if search is None else [search_section(search, plan.settings, plan.axes, plan.devices)]
    return Document(
        title=f"Plan of {plan.recipe}",
        generator="recipec plan",
        command=("recipe plan", "estimate"),
        name=plan.recipe,
        hardware=_hardware(plan),
        figures=_figures(plan),
        sections=[
            _memory(estimate),
            _time(estimate),
            *_generation(plan),
            _roofline(estimate),
            _mesh(plan),
            _collectives(plan),
            _run(plan),
            *searched,
            *_serving(serving),
            _basis(plan),
        ],
        alarms=[*([("It does not fit.", needed)] if memory.headroom < 0 else []), *_too_large(plan)],
        sentence=f"{ESTIMATES} {plan.run.interval.basis}" if estimate.seconds else ESTIMATES,
    )


def first_document(plan: Plan) -> Document:
    """Return the document of a first estimate, which a terminal shows while all layers are scheduled."""
    estimate = plan.estimate
    layers = listing([str(count) for count in estimate.scheduled_layers])
    usual = "" if estimate.compiled_layers else ", and what operations usually take"
    dense, experts = (f"{100 * error:.0f} %" for error in (MEMORY_ERROR, EXPERTS_MEMORY_ERROR))
    return Document(
        name=f"First estimate of {plan.recipe}",
        hardware=_hardware(plan),
        figures=_figures(plan),
        sections=[],
        sentence=(
            f"From schedules of {layers} of its {plural(estimate.layers, 'layer')}{usual}: the memory of the "
            f"whole can differ by {dense}, with experts by {experts}. The plan follows, and says what "
            "changes."
        ),
    )


def _serving(documents: Sequence[tuple[str, Document]]) -> list[Section]:
    """Return documents on serving as sections of this one."""
    sections = [Section("serving", "Serving", ("Planned from the recipe's serve; estimates too.",), ())]
    for title, document in documents:
        sections += [Section("", title, (), ()), *document.sections]
    return sections if documents else []


def _figures(plan: Plan) -> list[Figure]:
    """Return each figure as estimated, with its interval below it."""
    estimate, run, memory = plan.estimate, plan.run, plan.estimate.memory
    known = estimate.seconds > 0

    def figure(
        name: str,
        value: float | None,
        write: Callable[[float], str],
        inverse: bool = False,
        interval: Interval = run.interval,
    ) -> Figure:
        if not value:
            return Figure(name, NOT_KNOWN, ())
        return Figure(name, write(value), (within(interval, value, write, inverse),))

    step = figure("Step of a micro-batch", estimate.seconds, ms, interval=estimate.interval)
    cost = figure(f"Cost of the run{_bound(plan)}", run.usd, usd)
    if run.usd and run.usd_per_hour is not None:
        cost = replace(cost, below=(*cost.below, f"{usd(run.usd_per_hour)} an hour"))
    used = (f"{gib(memory.used)} of {capacity(memory.available)}", left(memory))
    return [
        step if known else Figure(step.name, NOT_KNOWN, ("the compiler refused it",)),
        figure(_tokens(plan), run.tokens_per_second, number, True),
        figure("Model FLOPs utilization (MFU)", estimate.mfu, percent, True, estimate.interval),
        Figure("HBM of a device", percent(memory.share), used, bad=memory.headroom < 0),
        figure(f"Run{_bound(plan)}", run.hours, hours),
        Figure(cost.name, NO_PRICE) if run.usd_per_hour is None else cost,
    ]


def within(interval: Interval, value: float, write: Callable[[float], str], inverse: bool = False) -> str:
    """Return the interval of a figure that is proportional to a time, or to its inverse."""
    low, high = interval.of(1.0)
    ends = (value / high, value / low) if inverse else (value * low, value * high)
    return " to ".join(map(write, ends))


def _hardware(plan: Plan) -> list[tuple[str, str]]:
    return [
        ("Model", plan.model),
        ("Machine", plan.accelerator),
        (
            "Mesh",
            f"{mesh_axes(plan.axes)} = {_devices(plan)}; a micro-batch is {_micro_batch(plan.estimate)}",
        ),
    ]


def _devices(plan: Plan) -> str:
    return f"{plural(plan.devices, 'device')} on {plural(plan.hosts, 'host')}"


def _micro_batch(estimate: Estimate) -> str:
    return f"{plural(estimate.rows, 'row')} of {number(estimate.row_length)} tokens"


def _tokens(plan: Plan) -> str:
    """Name the unit of tokens a second: without the data, rows count as full."""
    if plan.generation is not None:
        return "Tokens a second, with generation"
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
    rows = [row for row, (_, _, size) in zip(rows, [*sizes, *sums], strict=True) if size]
    rules = [rule(end, f"the device has {capacity(memory.available)}")]
    if missing:
        rules.append(rule(memory.used / GIB, left(memory), 1, COLORS[7]))
    layout = {
        "barmode": "stack",
        "xaxis": axis("GiB", range=[0, max(memory.used / GIB, end) * 1.01]),
        "yaxis": {"visible": False},
        "margin": {"l": 8, "r": 12, "t": 46, "b": 190},
        "shapes": [shape for shape, _ in rules],
        "annotations": [note for _, note in rules],
    }
    head = ("part", "HBM", "of the device", "bytes", "what it is")
    parts = Table(
        head,
        rows,
        words=(4,),
        label="HBM by part",
        bad=(len(rows) - 1,) if missing else (),
        excerpt=Excerpt(len(rows) - len(sums), (0, 1, 2)),  # the sum and what is left are among the figures
    )
    against = f"HBM of one device by part, against the {capacity(memory.available)} that it has."
    blocks: list[Any] = [Plot("memory-parts", "", data, layout, 370, what=against, after=(parts,))]
    if estimate.largest:
        largest = [
            (starred(temporary.name), temporary.shape, number(temporary.count), gib(temporary.bytes))
            for temporary in estimate.largest
        ]
        alive = "Alive when the temporaries take most memory. Arrays of all layers together."
        origin = ("where it comes from", "shape", "arrays", "HBM")
        where = Table(origin, largest, words=(1,), excerpt=Excerpt(TEMPORARIES))
        blocks += [Text("The largest temporaries", "heading"), Text(alive, detail=True), where]
    return Section("memory", "Memory", (), blocks)


def _time(estimate: Estimate) -> Section:
    batch = _micro_batch(estimate)
    what = f"One micro-batch on one device, {batch}: forward, backward and the optimizer's update."
    if not estimate.seconds:
        refused = Text("The compiler refused the step, and gives no time for what does not fit.", "")
        return Section("time", "Time", (), (refused,))
    parts = [(name, MEANT[name], seconds) for name, seconds in estimate.timeline.parts.items() if seconds]
    if abs(rest := estimate.seconds - estimate.timeline.seconds) > ROUNDED * estimate.seconds:
        parts.append(("by probes of such machines", "what their steps took longer or shorter", rest))
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
    sums = [("estimate", within(estimate.interval, estimate.seconds, ms), estimate.seconds)]
    table = Table(
        ("part", "time", "of the step", "what it is"),
        [
            (name, ms(seconds), percent(seconds / estimate.seconds), what)
            for name, what, seconds in [*parts, *sums]
        ],
        words=(3,),
        label="Time by part",
        excerpt=Excerpt(len(parts), (0, 1, 2)),
    )
    needs = (
        f"The model needs {flops(estimate.model_flops, 'FLOP')} of a device, recomputation not counted: at "
        f"the peak of {flops(estimate.peak_flops, 'FLOP/s')} that is {ms(peak)}, {percent(estimate.mfu)} of "
        "the estimate."
    )
    plot = Plot("time-parts", "", data, layout, 370, what=what, after=(table, Text(needs, detail=True)))
    return Section("time", "Time", (), (plot, *_waits(estimate), *_worked(estimate), *_drawn(estimate)))


PARTS = {
    "handing over": "what is trained, in the layout of the rollout",
    "prompts": "one pass over all prompts, which fills the cache",
    "tokens": "a pass for each token of the longest completion",
    "log-probabilities before": "a forward pass, as several steps train on a batch",
    "reference": "the model before training: its share of the compiled step, by FLOPs",
    "update": "the rest of the compiled step, all micro-batches",
}
"""The meaning of each part of an optimizer step that learns from rewards."""


def _generation(plan: Plan) -> Iterator[Section]:
    """Yield the section on an optimizer step with the generation of its completions, if there is one."""
    rolled, estimate = plan.generation, plan.estimate
    if rolled is None:
        return
    update = estimate.seconds * plan.run.micro_batches
    blocks: list[Block] = [Text(sentence) for sentence in _rollout_sentences(rolled)]
    if update:
        parts = rolled.parts(update)
        step = sum(parts.values())
        rows = [
            (name, _seconds(seconds), percent(seconds / step), PARTS[name])
            for name, seconds in parts.items()
            if seconds
        ]
        rows.append(("an optimizer step", _seconds(step), percent(1.0), _thousand(plan, rolled, step)))
        head = ("part", "time", "of the step", "what it is")
        blocks.insert(0, Table(head, rows, words=(3,), label="An optimizer step", excerpt=Excerpt(len(rows))))
    need, memory = rolled.need, estimate.memory
    sizes = [
        ("training's state", need.state, "stays while completions are generated"),
        ("weights of the rollout", need.weights, "a second copy in its layout"),
        ("keys and values", need.cache, f"of {plural(rolled.rows, 'completion')} at once"),
        ("logits and prompts", need.work, "what the passes work on"),
        ("all while it generates", need.total, f"of {capacity(memory.available)}"),
        ("all while it trains", memory.used, "at another time: not added to the line above"),
    ]
    held = [(name, gib(size), percent(size / memory.available), what) for name, size, what in sizes if size]
    head = ("part", "HBM", "of the device", "what it is")
    memories = Table(head, held, words=(3,), label="HBM while it generates", excerpt=Excerpt(len(held)))
    yield Section("generation", "Generation", (), [*blocks, memories])


def _rollout_sentences(rolled: Generation) -> Iterator[str]:
    """Yield sentences on how completions are generated, and on what that costs."""
    decode = rolled.decode
    moves = [f"reads {moved(decode.weights)} of weights", f"{moved(decode.cache)} of keys and values"]
    if decode.gathered:
        moves.append(f"gathers {moved(decode.gathered)} of weights")
    if decode.summed:
        moves.append(f"exchanges {moved(decode.summed)} of activations with other devices")
    yield (
        f"{plural(rolled.completions, 'completion')} of {plural(rolled.prompts, 'prompt')} are generated on "
        f"{mesh_axes(rolled.axes)}, {number(rolled.rows)} at once."
    )
    if rolled.share < 1:
        yield f"{percent(rolled.share)} of the optimizer steps generate. The times of a step are means."
    yield f"{_pass_time(rolled)} A device {listing(moves)}."
    yield (
        f"The loop ends with its longest completion. {number(rolled.passes)} passes a round are the most, so "
        "the time of tokens is an upper bound."
    )
    if decode.gathered > decode.weights:
        way = f"`rollout: {{axes: {_axes(rolled.alternative)}}}` gathers fewer"
        better = way if rolled.alternative else "no layout that gathers fewer fits the memory"
        yield (
            f"fsdp gathers {moved(decode.gathered)} of weights for every token, in "
            f"{ms(decode.link_seconds if decode.compiled is None else decode.waits)}: {better}."
        )


def _pass_time(rolled: Generation) -> str:
    """Say how long a pass of one token takes, and where the figure comes from."""
    decode = rolled.decode
    if decode.compiled is None or rolled.estimated is None:
        limit = "links" if decode.link_seconds > decode.memory_seconds else "memory"
        return (
            f"An estimate from shapes, not compiled or measured: a pass of one token takes "
            f"{ms(decode.seconds)}, mostly for the {limit}."
        )
    layers = listing([str(count) for count in rolled.compiled_layers])
    return (
        f"Compiled by libtpu from {layers} layers, not measured: a pass of one token takes "
        f"{ms(decode.seconds)}, of which it waits {ms(decode.waits)}. By shapes it would take "
        f"{ms(rolled.estimated.decode.seconds)}."
    )


def _axes(axes: dict[str, int]) -> str:
    return f"{{{', '.join(f'{axis}: {size}' for axis, size in axes.items())}}}"


def _seconds(seconds: float) -> str:
    return ms(seconds) if seconds < 1 else f"{seconds:,.1f} s"


def _thousand(plan: Plan, rolled: Generation, step: float) -> str:
    """Return the time and the price of a thousand prompts.

    Args:
        step: seconds of an optimizer step.
    """
    spent = step * rolled.iterations / rolled.prompts * 1000
    price = plan.run.usd_per_hour
    cost = "" if price is None else f", {usd(price * spent / 3600)}"
    return f"a thousand prompts take {hours(spent / 3600)}{cost}"


def _too_large(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield an alarm if completions do not fit, by their estimate."""
    rolled, available = plan.generation, plan.estimate.memory.available
    if rolled is not None and rolled.need.total > available:
        yield (
            "Its rollout does not fit.",
            f"While it generates, a device would need {gib(rolled.need.total)} of HBM, and "
            f"has {capacity(available)}: set rollout.rows to fewer than {number(rolled.rows)}.",
        )


def _waits(estimate: Estimate) -> Iterator[Block]:
    """Yield the transfers that the device waits for, by weight."""
    transfers = [transfer for transfer in estimate.timeline.transfers if transfer.exposed]
    if not transfers:
        return
    rows = [
        (
            *(transfer.kind, starred(transfer.name), number(transfer.count), moved(transfer.bytes)),
            *(ms(transfer.seconds), ms(transfer.exposed)),
        )
        for transfer in transfers[:WAITS]
    ]
    yield Text("What the device waits for", "heading")
    yield Text("Transfers of all layers together, those first for which it waits longest.", detail=True)
    head = ("kind", "weight or operation", "times", "bytes", "takes", "exposed")
    rest = f"{ms(sum(transfer.exposed for transfer in transfers[EXPOSED:]))} together"
    excerpt = Excerpt(EXPOSED, (0, 1, 4, 5), rest)
    yield Table(head, rows, words=(1,), label="Exposed transfers", excerpt=excerpt)


def _worked(estimate: Estimate) -> Iterator[Block]:
    """Yield the operations that the device works on longest, by name."""
    work = [
        *(
            (
                operation.seconds,
                starred(operation.name),
                "products" if operation.products else "other",
                operation.count,
            )
            for operation in estimate.timeline.operations
        ),
        *((kernel.seconds, kernel.name, "kernel", kernel.count) for kernel in estimate.kernels),
    ]
    if not work:
        return
    longest = sorted(work, key=lambda row: -row[0])[:WAITS]
    rows = [(name, kind, number(count), ms(seconds)) for seconds, name, kind, count in longest]
    yield Text("What the device works on", "heading")
    yield Text("Operations and kernels of all layers together, the longest first.", detail=True)
    head = ("weight and operation", "kind", "times", "takes")
    yield Table(head, rows, words=(0,), label="Longest work", excerpt=Excerpt(WORKED, (0, 2, 3)))


def starred(name: str) -> str:
    """Write the number of a layer in a name as a star: "layers.*.mlp.up_proj.kernel"."""
    return name.replace("{}", "*")


def _drawn(estimate: Estimate) -> Iterator[Block]:
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
    yield Text("The step as it is scheduled", "heading", detail=True)
    yield Text("Bars in one column run at the same time. Short ones are drawn as one.", detail=True)
    yield Plot("timeline", "", data, layout, 60 + 45 * len(lanes))


def points(estimate: Estimate) -> list[tuple[str, int, float, float, float]]:
    """Return (name, count, FLOPs, bytes, seconds) of the step and each kind of kernel, if none is 0."""
    done = estimate.flops + sum(kernel.flops for kernel in estimate.kernels)
    count = estimate.bytes + sum(kernel.bytes for kernel in estimate.kernels)
    work = [
        ("the whole step", 1, done, count, estimate.seconds),
        *(
            (kernel.name, kernel.count, kernel.flops, kernel.bytes, kernel.seconds)
            for kernel in estimate.kernels
        ),
    ]
    return [row for row in work if min(row[2:]) > 0]


def _roofline(estimate: Estimate) -> Section:
    shown, peak, bandwidth = points(estimate), estimate.peak_flops, estimate.bandwidth
    ridge = peak / bandwidth
    marks = [chr(ord("a") + i % 26) + (str(i // 26) if i >= 26 else "") for i in range(len(shown))]
    x = [done / size for _, _, done, size, _ in shown]
    y = [done / seconds / 1e12 for _, _, done, _, seconds in shown]
    ends = [min([ridge, *x]) / 8, ridge, max([ridge, *x]) * 4]
    roof = [ends[0] * bandwidth / 1e12, peak / 1e12, peak / 1e12]
    named = f"peak {flops(peak, 'FLOP/s')}, HBM {gb_number(bandwidth, 0)} GB/s"
    low = [min(roof + y), peak / 1e12]
    data = [
        scatter(named, ends, roof, INK, hoverinfo="skip"),
        scatter(f"ridge, {number(ridge)} FLOP a byte", [ridge] * 2, low, INK, dash="dot", hoverinfo="skip"),
    ]
    whole = [name.startswith("the whole") for name, *_ in shown]
    for name, of_step, color, symbol in (
        ("step", True, COLORS[0], "circle"),
        ("kernels", False, COLORS[3], "diamond"),
    ):
        which = [i for i in range(len(shown)) if whole[i] == of_step]
        pointed = [f"{shown[i][0]}: {x[i]:,.0f} FLOP a byte, {flops(y[i] * 1e12, 'FLOP/s')}" for i in which]
        at = [[values[i] for i in which] for values in (x, y, marks)]
        more = {"text": at[2], "textposition": "bottom center", "said": pointed, "symbol": symbol, "size": 11}
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
    step = (
        f"By the compiled program, loops counted in full, the step has {flops(estimate.flops, 'FLOP')}, "
        f"{ms(estimate.flops / peak)} at the peak, and {moved(estimate.bytes)}, "
        f"{ms(estimate.bytes / bandwidth)} at the memory's bandwidth."
    )
    kernels = (
        "The kernels are added from their shapes, and their times are those of kernels that were measured."
    )
    sentences = [Text(step), *([Text(kernels)] if estimate.kernels else [])]
    head = ("", "what", "times", "FLOPs", "HBM traffic", "FLOP a byte", "time", "speed", "of the peak")
    table = Table(head, rows, words=(1,), label="Points of the roofline")
    after = (table, *sentences) if rows else (Text("There is no time to draw a point with.", ""),)
    reached = (
        "What a device reaches at the estimated times, against its peak and its memory's bandwidth. To the "
        f"left of the ridge, at {number(ridge)} FLOP a byte, memory is the limit."
    )
    plot = Plot("roofline-points", "", data, layout, 490, what=reached, after=after)
    return Section("roofline", "Roofline", (), (plot,), detail=True)


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
    for cut, placements in sorted(by_axes.items(), key=lambda item: -_bytes(item[1])):
        pieces = math.prod(plan.axes[axis] for axis in cut)
        held = (
            f"{plural(pieces, 'piece')}, each on {plural(plan.devices // pieces, 'device')}; " if cut else ""
        )
        blocks += [
            Text(f"Cut over {listing(cut)}" if cut else "Whole on every device", "heading"),
            Text(f"{held}{gib(_bytes(placements))} a device"),
            *_placed(plan, sorted(placements, key=lambda placement: -placement.bytes)),
        ]
    return Section("mesh", "Mesh", aside, blocks, detail=True)


def _bytes(placements: Sequence[Placement]) -> float:
    return sum(placement.bytes for placement in placements)


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

    def described(device: int) -> str:
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
        "customdata": [[described(device) for device in line] for line in lines],
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


def _placed(plan: Plan, placements: Sequence[Placement]) -> list[Table]:
    """List a group's arrays with the axis that shards each dimension; small arrays are folded away."""

    def shape(placement: Placement) -> str:
        spec = placement.spec + (None,) * (len(placement.shape) - len(placement.spec))
        sizes = zip(placement.shape, spec, strict=True)
        return " × ".join(
            " ".join([number(size), " x ".join(_split_over(plan, axis))]).rstrip() for size, axis in sizes
        )

    rows = tuple(
        (starred(placement.pattern), number(placement.count), shape(placement), gib(placement.bytes))
        for placement in placements
    )
    shown = SHOWN if len(rows) > SHOWN + 1 else len(rows)
    head = ("arrays", "count", "shape and axis", "a device")
    tables = [Table(head, rows[:shown], words=(2,))]
    return tables + (
        [Table(head, rows[shown:], words=(2,), folded=f"{len(rows) - shown} smaller")] if rows[shown:] else []
    )


def _collectives(plan: Plan) -> Section:
    estimate, between = plan.estimate, " or between slices (DCN)" if plan.slices > 1 else ""
    exchanged = (
        f"What devices exchange within a micro-batch, over the chips' own links (ICI){between}. What the "
        "device waits for them is a part of its estimated time; the rest is hidden behind its work."
    )
    collectives = sorted(estimate.collectives, key=lambda collective: -collective.bytes)
    rows = [
        (
            collective.kind,
            listing(collective.axes) or "other groups",
            "DCN" if collective.over_dcn else "ICI",
            number(collective.count),
            moved(collective.bytes),
        )
        for collective in collectives
    ]
    none = (
        "The compiled step has none."
        if estimate.seconds
        else "The compiler refused the step, and shows none."
    )
    rest = f"{moved(sum(collective.bytes for collective in collectives[COLLECTIVES:]))} together"
    head = ("kind", "axes", "network", "times", "arrives at a device")
    excerpt = Excerpt(COLLECTIVES, (), rest)
    table = Table(head, rows, words=(1, 2), label="Collectives", excerpt=excerpt)
    blocks = (table, Text(exchanged, detail=True)) if rows else (Text(none, ""),)
    return Section("collectives", "Collectives", (), blocks, detail=not estimate.seconds)


def _run(plan: Plan) -> Section:
    """Return the estimate and interval of each figure of the whole run; "" where it has none.

    The last rows are among the document's figures, or in other sections, and a terminal shows them there.
    """
    estimate, run = plan.estimate, plan.run
    known, counted, bound = run.tokens_per_second > 0, run.source == "data", _bound(plan)
    counted = counted and plan.generation is None
    million = run.usd_per_million_tokens
    micro_batches = (
        f" of {run.micro_batches} micro-batches" if run.steps and (run.micro_batches or 1) > 1 else ""
    )

    def around(value: float | None, write: Callable[[float], str], inverse: bool = False) -> str:
        return within(run.interval, value, write, inverse) if value else ""

    rows = [
        (f"Optimizer steps{bound}", f"{number(run.steps)}{micro_batches}", ""),
        (
            "A million real tokens" if counted else "A million tokens, at least",
            usd(million),
            around(million, usd),
        ),
        ("Price an hour", NO_PRICE if run.usd_per_hour is None else usd(run.usd_per_hour), ""),
        ("Real tokens a row" if counted else "Tokens a row, at most", number(run.tokens_per_row), ""),
        (
            _tokens(plan),
            number(run.tokens_per_second) if known else NOT_KNOWN,
            around(run.tokens_per_second, number, True),
        ),
        (f"Time{bound}", hours(run.hours), around(run.hours, hours)),
        (f"Cost{bound}", usd(run.usd), around(run.usd, usd)),
    ]
    table = Table(("", "estimate", "within"), rows, label="The run", excerpt=Excerpt(2))
    return Section("run", "The run", (run.note,), (table,), detail=not estimate.seconds)


def _basis(plan: Plan) -> Section:
    """Say what was compiled, with which settings and versions."""
    estimate = plan.estimate
    layers = plural(estimate.layers, "layer")
    slices = f"{plural(plan.slices, 'slice')} of " if plan.slices > 1 else ""
    step = f"of the step of {plan.script} were"
    whole = f"All {layers} {step} compiled to the end for {slices}{plan.topology}."
    if estimate.compiled_layers and estimate.compiled_layers != (estimate.layers,):
        whole = (
            f"All {layers} {step} scheduled for {slices}{plan.topology}, and {estimate.compiled_layers[0]} "
            "compiled to the end for the times of their operations."
        )
    if estimate.scheduled_layers:
        whole = (
            f"Schedules of {listing([str(count) for count in estimate.scheduled_layers])} layers {step} "
            f"compiled for {slices}{plan.topology}; all {layers} follow from them."
        )
    origin = "came from the cache" if plan.cached else "took"
    came = f"this plan {origin}{'' if plan.cached else f' {duration(plan.seconds)}'}"
    took = f"Compiling took {duration(estimate.compile_seconds)}, and {came}."
    settings = Facts(plan.settings.items(), "Settings", line=True)
    versions = Facts(plan.versions.items(), "Versions", line=True, detail=True)
    return Section(
        "basis",
        "What this rests on",
        (),
        (Items([whole, *plan.notes]), Text(took, detail=not plan.cached), settings, versions),
    )
