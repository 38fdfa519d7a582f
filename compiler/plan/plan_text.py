"""The documents that `recipe plan`, `recipe plan --search` and `recipe diff A B --plan` print."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.document import Block, Document, Items, Section, Table, Text, sheet
from recipec.compiler.pages.numbers import duration, flop_count, gib_number, milliseconds, percent, traffic
from recipec.compiler.plan.fit import yaml_lines
from recipec.compiler.plan.planner import settings
from recipec.compiler.plan.results import Collective, Estimate, Plan, Point, RunLength, Search
from recipec.compiler.wording import listing, mesh_axes, plural

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

WIDTH = 100
"""The columns that a plan takes at most."""

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
        texts = ["unknown" if number is None else write(number) for number in (old, new)]
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
    for key, words in PARTS.items():
        yield f"  {words}", float(getattr(memory, key)), _gib
    yield "HBM available", memory.available, _gib
    yield "share of it", memory.share, percent
    yield "real tokens of a micro-batch", run.tokens_per_second * estimate.seconds or None, _whole
    yield "its step", seconds, milliseconds
    for name, part in estimate.timeline.parts.items():
        yield f"  {name}", part if seconds else None, milliseconds
    yield "a real token", 1 / speed if speed else None, milliseconds
    yield "tokens/s", speed, _whole
    yield "MFU", estimate.mfu or None, percent
    for name in collectives:
        found = sum(c.bytes for c in estimate.collectives if _name(c) == name)
        yield name, found if seconds else None, traffic
    yield "devices", plan.devices, _whole
    yield "steps of the run", run.steps, _whole
    yield "hours", run.hours, _hundredths
    yield "US$", run.usd, _hundredths
    yield "US$ a million tokens", run.usd_per_million_tokens, _hundredths


def _title(plan: Plan) -> str:
    return f"{plan.recipe} on {plan.accelerator.partition(':')[0]}, mesh {mesh_axes(plan.axes)}"


def _name(collective: Collective) -> str:
    return f"{collective.kind}, {groups(collective)}"


def groups(collective: Collective) -> str:
    """Name the axes that a collective runs over: "fsdp", "fsdp and tp over DCN"."""
    axes = listing(collective.axes) or "other groups"
    return f"{axes} over DCN" if collective.over_dcn else axes


def _change(old: float | None, new: float | None) -> str:
    if old is None or new is None:
        return ""
    if not old:
        return "new"
    return f"{100 * (new / old - 1):+,.1f} %" if new else "gone"


def _gib(count: float) -> str:
    return f"{gib_number(count)} GiB"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


def _hundredths(number: float) -> str:
    return f"{number:,.2f}"


EXPOSED, WORKED, COLLECTIVES, KERNELS, TEMPORARIES = 4, 3, 4, 4, 2
"""How many rows of each table are shown."""
ROUNDED = 1e-6
"""Share of a step below which the difference from the sum of its parts is rounding."""


def document(plan: Plan) -> Document:
    """Return a plan without a search, for a reader of at most 100 columns."""
    estimate = plan.estimate
    refused = _untitled(["The compiler refused the step, so its time is not known."])
    sections = [_head(plan), _memory(estimate), refused, *_temporaries(estimate)]
    if estimate.seconds:
        parts = (_exposed, _worked, _collectives, _kernels, _temporaries)
        tables = (section for part in parts for section in part(estimate))
        sections[2:] = [_time(plan), *tables, _run(plan.run)]
    return Document("", [*sections, _foot(plan)])


def _untitled(sentences: Iterable[str]) -> Section:
    return Section("", "", (), [Text(sentence) for sentence in sentences])


def _head(plan: Plan) -> Section:
    return _untitled(_described(plan))


def _described(plan: Plan) -> Iterator[str]:
    """Yield sentences on what was planned, and how."""
    estimate = plan.estimate
    yield f"{plan.recipe}: {plan.model}"
    yield plan.accelerator
    slices = f" of {plural(plan.slices, 'slice')}" if plan.slices > 1 else ""
    yield (
        f"mesh {mesh_axes(plan.axes)} = {plural(plan.devices, 'device')} on {plural(plan.hosts, 'host')}"
        f"{slices}; a micro-batch is {plural(estimate.rows, 'row')} of {estimate.row_length:,} tokens"
    )
    yield ", ".join(f"{path} {value}" for path, value in plan.settings.items())
    layers = plural(estimate.layers, "layer")
    if estimate.compiled_layers == (estimate.layers,):
        how = f"All {layers} were compiled for {plan.topology}"
    else:
        how = f"All {layers} were scheduled for {plan.topology}, {estimate.compiled_layers[0]} were compiled "
        how += "to the end for the times of their operations"
    if plan.backend != "tunix":
        how = f"The step is {plan.script}'s. {how}"
    yield f"{how}; nothing was measured on a TPU."


def _memory(estimate: Estimate) -> Section:
    memory = estimate.memory
    parts = [(words, float(getattr(memory, key))) for key, words in PARTS.items()]
    rows = [
        [words, gib_number(count), percent(count / memory.available)]
        for words, count in parts
        if gib_number(count) != "0.00"
    ]
    rows.append(["in all", gib_number(memory.used), percent(memory.share)])
    left = "headroom" if memory.headroom >= 0 else "MISSING"
    rows.append(
        [
            left,
            gib_number(abs(memory.headroom)),
            percent(abs(memory.headroom) / memory.available),
            f"of the {gib_number(memory.available)} that it has",
        ]
    )
    title = "HBM of each device, as the compiler lays it out (an estimate, in GiB)"
    return Section("", title, (), [Table((), rows, words=(3,))])


def _time(plan: Plan) -> Section:
    estimate, run = plan.estimate, plan.run
    most = "" if run.source == "data" else "at most "
    parts = estimate.timeline.parts.items()
    times = [[name, milliseconds(seconds)] for name, seconds in parts if seconds]
    if abs(more := estimate.seconds - estimate.timeline.seconds) > ROUNDED * estimate.seconds:
        times.append(["by probes of such machines", milliseconds(more)])
    low, high = estimate.interval.of(estimate.seconds)
    fast, slow = (run.tokens_per_second * estimate.seconds / seconds for seconds in (low, high))
    times += [
        [
            *("= the step", milliseconds(estimate.seconds)),
            *(f"{most}{run.tokens_per_second:,.0f} tokens/s", f"MFU {percent(estimate.mfu)}"),
        ],
        ["within", f"{milliseconds(low)} to {milliseconds(high)}", f"{slow:,.0f} to {fast:,.0f} tokens/s"],
    ]
    work = [
        [
            "FLOPs",
            flop_count(estimate.flops),
            f"{_at(estimate.flops, estimate.peak_flops, 'TFLOP/s', 1e12)}, without the custom kernels'",
        ],
        [
            "needed",
            flop_count(estimate.model_flops),
            "by the model for full rows, without recomputation; MFU counts these",
        ],
        ["bytes", traffic(estimate.bytes), _at(estimate.bytes, estimate.bandwidth, "GB/s", 1e9)],
    ]
    blocks: list[Block] = [Table((), times), Text(estimate.interval.basis), Table((), work, words=(2,))]
    return Section("", "One micro-batch, forward, backward and update (estimates)", (), blocks)


def _exposed(estimate: Estimate) -> list[Section]:
    found = [one for one in estimate.timeline.transfers if one.exposed]
    rows = [
        [one.kind, one.name.replace("{}", "*"), milliseconds(one.exposed), f"of {milliseconds(one.seconds)}"]
        for one in found[:EXPOSED]
    ]
    rest = milliseconds(sum(one.exposed for one in found[EXPOSED:]))
    return _listed("The longest waits of the device, of all layers together", rows, (1,), found, rest)


def _worked(estimate: Estimate) -> list[Section]:
    rows = [
        [one.name.replace("{}", "*"), f"{one.count:,.0f} x", milliseconds(one.seconds)]
        for one in estimate.timeline.operations[:WORKED]
    ]
    return _listed("The longest operations, of all layers together", rows, ())


def _collectives(estimate: Estimate) -> list[Section]:
    found = sorted(estimate.collectives, key=lambda c: -c.bytes)
    rows = [[c.kind, groups(c), f"{c.count:,} x", traffic(c.bytes)] for c in found[:COLLECTIVES]]
    title = "Collectives of a micro-batch on one device, from the compiled program"
    return _listed(title, rows, (1,), found, traffic(sum(c.bytes for c in found[COLLECTIVES:])))


def _kernels(estimate: Estimate) -> list[Section]:
    found = sorted(estimate.kernels, key=lambda k: -k.seconds)
    rows = [
        [k.name, f"{k.count:,} x", flop_count(k.flops), traffic(k.bytes), milliseconds(k.seconds)]
        for k in found[:KERNELS]
    ]
    title = "Custom kernels (estimates from their shapes, by kernels that were measured)"
    return _listed(title, rows, (), found, milliseconds(sum(k.seconds for k in found[KERNELS:])))


def _temporaries(estimate: Estimate) -> list[Section]:
    found = sorted(estimate.largest, key=lambda t: -t.bytes)[:TEMPORARIES]
    rows = [[gib_number(t.bytes), f"{t.count:,} x", t.shape, t.name.replace("{}", "*")] for t in found]
    return _listed("Largest temporaries, at the peak of memory (GiB)", rows, (2, 3))


def _listed(
    title: str,
    rows: Sequence[Sequence[str]],
    words: Sequence[int],
    found: Sequence[object] = (),
    rest: str = "",
) -> list[Section]:
    """Return a section with the first rows of what was found, and what the others are together."""
    blocks: list[Block] = [Table((), rows, words=words)]
    if len(found) > len(rows):
        blocks.append(Text(f"and {len(found) - len(rows)} more, {rest} together"))
    return [Section("", title, (), blocks)] if rows else []


def _at(amount: float, speed: float, unit: str, size: float) -> str:
    return f"{milliseconds(amount / speed)} at {speed / size:,.0f} {unit}"


def _run(run: RunLength) -> Section:
    batches = "1 micro-batch" if run.micro_batches == 1 else f"{run.micro_batches:,} micro-batches"
    bound = ", at most" if run.source == "bound" else ""
    rows = [
        [f"steps of {batches}", "unknown" if run.steps is None else f"{run.steps:,}"],
        ["hours", _known(run.hours), _within(run, run.hours)],
    ]
    if run.usd_per_hour is None:
        rows.append(["US$", "no price"])
    else:
        rows.append([f"US$, at {run.usd_per_hour:,.2f} an hour", _known(run.usd), _within(run, run.usd)])
    if run.usd_per_million_tokens is not None:
        price = run.usd_per_million_tokens
        name = "US$ a million real tokens" if run.source == "data" else "US$ a million tokens, at least"
        rows.append([name, f"{price:,.3f}", _within(run, price, 3)])
    table = Table((f"The whole run{bound}", "estimate", "within"), rows)
    return Section("", "", (), [table, Text(run.note)])


def _known(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.2f}"


def _within(run: RunLength, figure: float | None, digits: int = 2) -> str:
    if figure is None:
        return ""
    low, high = run.interval.of(figure)
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def _foot(plan: Plan) -> Section:
    return _untitled(_origin(plan))


def _origin(plan: Plan) -> Iterator[str]:
    """Yield sentences on how long planning took, with which versions, and the plan's notes."""
    compiling = f"compiling took {duration(plan.estimate.compile_seconds)}"
    if plan.cached:
        yield f"Planned in {duration(plan.seconds)}, from the cache; {compiling} when it was filled."
    else:
        yield f"Planned in {duration(plan.seconds)}; {compiling}."
    yield ", ".join(f"{name} {version}" for name, version in plan.versions.items())
    for note in plan.notes:
        yield f"note: {note}"


STATUSES = ("compiled", "too large", "pruned", "refused", "failed")
REASONS = 6
"""How many reasons of refused and of failed configurations are shown."""
LEGEND = (
    "mesh: {axes}. ms/token: milliseconds a real token, over all devices. step: seconds of a "
    "micro-batch. GiB, HBM: of each device, and the share of its memory. {price} waits: seconds of a step "
    "that the device waits for collectives and copies, a part of `step`."
)


def search_document(program: Program, found: Search) -> Document:
    """Return the result of a search.

    Args:
        program: the program of the unchanged recipe.
    """
    parts = (_front(program, found), _standing(program, found), _best(program, found), _rest(found))
    return Document("", [section for section in parts if section.blocks])


def _front(program: Program, found: Search) -> Section:
    title = (
        "Configurations that no other beats in time, memory and cost: estimates of the compiler; "
        "nothing was measured on a TPU"
    )
    if not found.front:
        return Section("", title, (), [Text("none: nothing that was compiled fits")])
    price = _price(program, found.points[found.front[0]])[0]
    meaning = (
        "US$/M: of a million real tokens."
        if price == "US$/M"
        else f"{price}: seconds of all devices together for a million real tokens; there is no price."
    )
    legend = LEGEND.format(axes=" x ".join(program.recipe.mesh.axes), price=meaning)
    return Section("", title, (), [_table(program, found, found.front), Text(legend)])


def _standing(program: Program, found: Search) -> Section:
    """Say where the unchanged recipe is among the results."""
    table: list[Block] = []
    if found.baseline is None:
        point = next((point for point in found.points if not point.sets), None)
        reason = f": {point.reason}" if point and point.reason else ""
        sentence = f"The recipe as it stands has no estimate{reason}."
    elif found.front and found.front[0] == found.baseline:
        sentence = "The recipe as it stands is the fastest of them."
    elif found.baseline in found.front:
        place = found.front.index(found.baseline) + 1
        sentence = f"The recipe as it stands is number {place} of them. {_gain(found)}"
    else:
        sentence = f"The recipe as it stands is not one of them. {_gain(found)}"
        table = [_table(program, found, [found.baseline])]
    return Section("", sentence, (), table) if table else _untitled([sentence])


def _gain(found: Search) -> str:
    assert found.baseline is not None
    fastest, own = (found.points[i].seconds_per_token for i in (found.front[0], found.baseline))
    assert fastest is not None and own is not None
    return f"The fastest takes {fastest / own:.3f} times its time a token."


def _best(program: Program, found: Search) -> Section:
    """Show the recipe lines of the fastest configuration."""
    if not found.front or not found.points[found.front[0]].sets:
        return _untitled([])
    best = found.points[found.front[0]]
    blocks = [Text("\n".join(yaml_lines(best.sets)), "code")]
    values, changed = settings(program), _values(best.sets)
    rows = "train.global_batch_size"
    if rows in changed:
        blocks.append(
            Text(
                f"It raises {rows} from {values[rows]} to {changed[rows]}: another optimization, with fewer "
                "steps over the same data."
            )
        )
    return Section("", "The fastest, as lines of the recipe:", (), blocks)


def _kernel(values: Mapping[str, str]) -> str:
    """Return a configuration's attention, with the block size unless it is the accelerator's own."""
    block = values["model.attention_block"]
    return values["model.attention"] + ("" if block == "null" else f" {block}")


def _rest(found: Search) -> Section:
    counts = Counter(point.status for point in found.points)
    words = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    total = plural(len(found.points), "configuration")
    blocks = [Text(f"{total} in {duration(found.seconds)}: {words or 'none was looked at'}.")]
    blocks += map(Text, found.notes)
    reasons: list[str] = []
    for status in ("refused", "failed"):
        of_status = Counter(point.reason for point in found.points if point.status == status)
        reasons += [f"{status}, {count} x: {reason}" for reason, count in of_status.most_common(REASONS)]
        if len(of_status) > REASONS:
            reasons.append(f"{status}: and {len(of_status) - REASONS} reasons more")
    return Section("", "", (), [*blocks, Items(reasons)])


def _table(program: Program, found: Search, indices: Sequence[int]) -> Table:
    base = settings(program)
    every = [base | _values(found.points[i].sets) for i in found.front]
    raised = any(values["train.global_batch_size"] != base["train.global_batch_size"] for values in every)
    price = _price(program, found.points[indices[0]])[0]
    head = ["mesh", "micro", *(["rows"] if raised else []), "remat", "attn.", "flags", "ms/token", "step"]
    head += ["GiB", "HBM", "MFU", price, "waits"]
    rows = [_row(program, found.points[i], base, raised) for i in indices]
    first = 3 if raised else 2
    return Table(head, rows, words=(first, first + 1, first + 2))


def _row(program: Program, point: Point, base: Mapping[str, str], raised: bool) -> list[str]:
    values = {**base, **_values(point.sets)}
    memory = point.memory
    assert memory and point.seconds_per_token and point.step_seconds and point.mfu is not None
    return [
        " x ".join(re.findall(r"\d+", values["mesh.axes"])),
        values["train.micro_batch_size"],
        *([values["train.global_batch_size"]] if raised else []),
        values["remat.policy"],
        _kernel(values),
        values["xla.profile"],
        f"{1000 * point.seconds_per_token:.4f}",
        f"{point.step_seconds:.3f}",
        f"{memory.used / 2**30:.1f}",
        f"{100 * memory.share:.0f} %",
        f"{100 * point.mfu:.0f} %",
        _price(program, point)[1],
        "" if point.exposed_seconds is None else f"{point.exposed_seconds:.3f}",
    ]


def _price(program: Program, point: Point) -> tuple[str, str]:
    """Return the cost of a million tokens: the column's name, and the figure."""
    if point.usd_per_million_tokens is not None:
        return "US$/M", f"{point.usd_per_million_tokens:.3f}"
    return "dev-s/M", f"{1e6 * (point.seconds_per_token or 0) * program.accelerator.devices:.0f}"


def _values(sets: Sequence[str]) -> dict[str, str]:
    return {path: value for path, _, value in (argument.partition("=") for argument in sets)}
