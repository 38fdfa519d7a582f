"""Write the text that `recipe plan` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from recipec.compiler.plan.compare import PARTS, TIMES, mesh
from recipec.compiler.plan.results import Estimate, Plan, RunLength
from recipec.compiler.plan.units import (
    WIDTH,
    aligned,
    duration,
    flops,
    gib,
    groups,
    milliseconds,
    percent,
    traffic,
    wrapped,
)
from recipec.compiler.wording import plural

EXPOSED, WORKED, COLLECTIVES, KERNELS, TEMPORARIES = 4, 3, 4, 4, 2
"""How many rows of each table are shown."""
ROUNDED = 1e-6
"""Share of a step below which the difference from the sum of its parts is rounding."""


def text(plan: Plan) -> str:
    """Return the whole text, in at most 100 columns."""
    compiled = plan.estimate.seconds > 0
    sections = [list(_head(plan)), list(_memory(plan.estimate))]
    if compiled:
        sections += [
            list(_time(plan)),
            list(_exposed(plan.estimate)),
            list(_worked(plan.estimate)),
            list(_collectives(plan.estimate)),
            list(_kernels(plan.estimate)),
        ]
    else:
        sections.append(["The compiler refused the step, so its time is not known."])
    sections.append(list(_temporaries(plan.estimate)))
    if compiled:
        sections.append(list(_run(plan.run)))
    sections.append(list(_foot(plan)))
    lines = "\n\n".join("\n".join(section) for section in sections if section).split("\n")
    return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..." for line in lines) + "\n"


def _head(plan: Plan) -> Iterator[str]:
    estimate = plan.estimate
    yield f"{plan.recipe}: {plan.model}"
    yield from wrapped(plan.accelerator)
    slices = f" of {plural(plan.slices, 'slice')}" if plan.slices > 1 else ""
    yield from wrapped(
        f"mesh {mesh(plan)} = {plural(plan.devices, 'device')} on {plural(plan.hosts, 'host')}{slices}; "
        f"a micro-batch is {plural(estimate.rows, 'row')} of {estimate.row_length:,} tokens"
    )
    yield from wrapped(", ".join(f"{path} {value}" for path, value in plan.settings.items()))
    layers = plural(estimate.layers, "layer")
    if estimate.compiled_layers == (estimate.layers,):
        how = f"All {layers} were compiled for {plan.topology}"
    else:
        how = f"All {layers} were scheduled for {plan.topology}, {estimate.compiled_layers[0]} were compiled "
        how += "to the end for the times of their operations"
    if plan.backend != "tunix":
        how = f"The step is {plan.script}'s. {how}"
    yield from wrapped(f"{how}; nothing was measured on a TPU.")


def _memory(estimate: Estimate) -> Iterator[str]:
    memory = estimate.memory
    yield "HBM of each device, as the compiler lays it out (an estimate, in GiB)"
    parts = [(words, float(getattr(memory, key))) for key, words in PARTS.items()]
    rows = [
        [words, gib(count), percent(count / memory.available)]
        for words, count in parts
        if gib(count) != "0.00"
    ]
    rows.append(["in all", gib(memory.used), percent(memory.share)])
    left = "headroom" if memory.headroom >= 0 else "MISSING"
    rows.append(
        [
            left,
            gib(abs(memory.headroom)),
            percent(abs(memory.headroom) / memory.available),
            f"of the {gib(memory.available)} that it has",
        ]
    )
    yield from aligned(rows, "<>><")


def _time(plan: Plan) -> Iterator[str]:
    estimate, run = plan.estimate, plan.run
    most = "" if run.source == "data" else "at most "
    yield "One micro-batch, forward, backward and update (estimates)"
    parts = {name: of(estimate.timeline) for name, of in TIMES.items()}
    rows = [[name, milliseconds(seconds)] for name, seconds in parts.items() if seconds]
    if abs(more := estimate.seconds - estimate.timeline.seconds) > ROUNDED * estimate.seconds:
        rows.append(["by probes of such machines", milliseconds(more)])
    low, high = estimate.interval.of(estimate.seconds)
    fast, slow = (run.tokens_per_second * estimate.seconds / seconds for seconds in (low, high))
    rows += [
        [
            *("= the step", milliseconds(estimate.seconds)),
            *(f"{most}{run.tokens_per_second:,.0f} tokens/s", f"MFU {percent(estimate.mfu)}"),
        ],
        ["within", f"{milliseconds(low)} to {milliseconds(high)}", f"{slow:,.0f} to {fast:,.0f} tokens/s"],
    ]
    yield from aligned(rows, "<>>>")
    yield from wrapped(estimate.interval.basis, "  ")
    rows = [
        [
            "FLOPs",
            flops(estimate.flops),
            f"{_at(estimate.flops, estimate.peak_flops, 'TFLOP/s', 1e12)}, without the custom kernels'",
        ],
        [
            "needed",
            flops(estimate.model_flops),
            "by the model for full rows, without recomputation; MFU counts these",
        ],
        ["bytes", traffic(estimate.bytes), _at(estimate.bytes, estimate.bandwidth, "GB/s", 1e9)],
    ]
    yield from aligned(rows, "<><")


def _exposed(estimate: Estimate) -> Iterator[str]:
    found = [one for one in estimate.timeline.transfers if one.exposed]
    if not found:
        return
    yield "The longest waits of the device, of all layers together"
    rows = [
        [one.kind, one.name.replace("{}", "*"), milliseconds(one.exposed), f"of {milliseconds(one.seconds)}"]
        for one in found[:EXPOSED]
    ]
    yield from aligned(rows, "<<>>")
    yield from _more(found, EXPOSED, milliseconds(sum(one.exposed for one in found[EXPOSED:])))


def _worked(estimate: Estimate) -> Iterator[str]:
    found = estimate.timeline.operations
    if not found:
        return
    yield "The longest operations, of all layers together"
    rows = [
        [one.name.replace("{}", "*"), f"{one.count:,.0f} x", milliseconds(one.seconds)]
        for one in found[:WORKED]
    ]
    yield from aligned(rows, "<>>")


def _at(amount: float, speed: float, unit: str, size: float) -> str:
    return f"{milliseconds(amount / speed)} at {speed / size:,.0f} {unit}"


def _collectives(estimate: Estimate) -> Iterator[str]:
    if not estimate.collectives:
        return
    yield "Collectives of a micro-batch on one device, from the compiled program"
    found = sorted(estimate.collectives, key=lambda c: -c.bytes)
    rows = [[c.kind, groups(c), f"{c.count:,} x", traffic(c.bytes)] for c in found[:COLLECTIVES]]
    yield from aligned(rows, "<<>>")
    yield from _more(found, COLLECTIVES, traffic(sum(c.bytes for c in found[COLLECTIVES:])))


def _kernels(estimate: Estimate) -> Iterator[str]:
    if not estimate.kernels:
        return
    yield "Custom kernels (estimates from their shapes, by kernels that were measured)"
    found = sorted(estimate.kernels, key=lambda k: -k.seconds)
    rows = [
        [k.name, f"{k.count:,} x", flops(k.flops), traffic(k.bytes), milliseconds(k.seconds)]
        for k in found[:KERNELS]
    ]
    yield from aligned(rows, "<>>>>")
    yield from _more(found, KERNELS, milliseconds(sum(k.seconds for k in found[KERNELS:])))


def _temporaries(estimate: Estimate) -> Iterator[str]:
    if not estimate.largest:
        return
    yield "Largest temporaries, at the peak of memory (GiB)"
    found = sorted(estimate.largest, key=lambda t: -t.bytes)
    rows = [[gib(t.bytes), f"{t.count:,} x", t.shape, t.name.replace("{}", "*")] for t in found[:TEMPORARIES]]
    yield from aligned(rows, ">><<")


def _run(run: RunLength) -> Iterator[str]:
    batches = "1 micro-batch" if run.micro_batches == 1 else f"{run.micro_batches:,} micro-batches"
    bound = ", at most" if run.source == "bound" else ""
    rows = [
        [f"the whole run{bound}", "estimate", "within"],
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
    head, *rest = aligned(rows, "<>>")
    yield f"The{head[5:]}"
    yield from rest
    yield from wrapped(run.note, "  ")


def _known(number: float | None) -> str:
    return "unknown" if number is None else f"{number:,.2f}"


def _within(run: RunLength, figure: float | None, digits: int = 2) -> str:
    if figure is None:
        return ""
    low, high = run.interval.of(figure)
    return f"{low:,.{digits}f} to {high:,.{digits}f}"


def _foot(plan: Plan) -> Iterator[str]:
    compiling = f"compiling took {duration(plan.estimate.compile_seconds)}"
    if plan.cached:
        yield f"Planned in {duration(plan.seconds)}, from the cache; {compiling} when it was filled."
    else:
        yield f"Planned in {duration(plan.seconds)}; {compiling}."
    yield from wrapped(", ".join(f"{name} {version}" for name, version in plan.versions.items()))
    for note in plan.notes:
        yield from wrapped(f"note: {note}")


def _more(found: Sequence[object], shown: int, rest: str) -> Iterator[str]:
    if len(found) > shown:
        yield f"  and {len(found) - shown} more, {rest} together"
