"""One estimate for the whole model, from the figures of its compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import rates
from recipec.compiler.plan.bound import model_flops, rows
from recipec.compiler.plan.depth import Depth, weighted
from recipec.compiler.plan.results import (
    Collective,
    Compiled,
    Estimate,
    Kernel,
    Memory,
    Temporary,
    Timeline,
)
from recipec.compiler.plan.timeline import combined
from recipec.compiler.plan.timeline import timeline as timeline_of

SHARED_CODE = 300 * 2**20
"""Bytes of code that no whole compile was seen to have: Gemma 3 4B's 10 and 16 layers have 107 and 171 MiB,
and all 34, which share theirs, 64; Gemma 4 E2B's 35 have 271, in a line with the smaller ones. Where an
extrapolation is beyond this, the largest compile's stands for it."""

SHOWN = 12
"""Temporaries that a plan names."""


def extrapolate(program: Program, depths: Sequence[Depth], compiled: Sequence[Compiled]) -> Estimate:
    """The figures of a program's whole model.

    Args:
        depths: what was compiled, with the weights of the sum.
        compiled: the results in their order.
    """
    compiled = [_with_refusal(one) for one in compiled]
    accelerator = program.accelerator

    def total(figure: Callable[[Compiled], float]) -> float:
        return max(0.0, weighted(depths, [figure(one) for one in compiled]))

    refused = any(one.out_of_memory for one in compiled)
    reached = rates.reached(accelerator.generation)
    timelines = [timeline_of(one.schedule, reached) for one in compiled]
    timeline = Timeline() if refused else combined(timelines, lambda figures: weighted(depths, figures))
    seconds = timeline.seconds
    needed = model_flops(program, rows(program) * program.recipe.data.max_length) / accelerator.devices
    peak = accelerator.peak_flops_per_device
    return Estimate(
        layers=program.architecture.num_layers,
        compiled_layers=tuple(one.layers for one in compiled),
        memory=_memory(program, total, compiled, _code(depths, compiled)),
        flops=total(lambda one: one.flops),
        bytes=total(lambda one: one.bytes),
        timeline=timeline,
        seconds=seconds,
        interval=rates.interval(accelerator.generation, program.lora is not None),
        peak_flops=peak,
        bandwidth=accelerator.bandwidth_per_device,
        model_flops=needed,
        mfu=needed / (seconds * peak) if seconds else 0.0,
        rows=rows(program),
        row_length=program.recipe.data.max_length,
        collectives=_collectives(depths, compiled),
        kernels=_kernels(depths, compiled),
        largest=_largest(depths, compiled),
        compile_seconds=sum(one.trace_seconds + one.compile_seconds for one in compiled),
    )


def _with_refusal(compiled: Compiled) -> Compiled:
    """A step that the compiler refused has the memory that it says the step needs, and no time."""
    refused = compiled.out_of_memory
    if refused is None:
        return compiled
    arguments = compiled.weights + compiled.adapters + compiled.optimizer + compiled.batch
    rest = max(0.0, refused.used - arguments)
    return replace(compiled, arguments=arguments, temporaries=rest, largest=refused.largest)


def _code(depths: Sequence[Depth], compiled: Sequence[Compiled]) -> float:
    sizes = [one.code for one in compiled]
    line = max(0.0, weighted(depths, sizes))
    return max(sizes) if len(sizes) > 1 and line > SHARED_CODE else line


def _memory(
    program: Program,
    total: Callable[[Callable[[Compiled], float]], float],
    compiled: Sequence[Compiled],
    code: float,
) -> Memory:
    by_shape = total(lambda one: one.weights + one.adapters + one.optimizer + one.batch)
    return Memory(
        weights=total(lambda one: one.weights),
        adapters=total(lambda one: one.adapters),
        optimizer=total(lambda one: one.optimizer),
        batch=total(lambda one: one.batch),
        padding=max(0.0, total(lambda one: one.arguments) - by_shape),
        # A few layers' may fall with depth, which those of a whole model do not.
        temporaries=max(total(lambda one: one.temporaries), *(one.temporaries for one in compiled)),
        code=code,
        available=program.accelerator.hbm_bytes_per_device,
    )


def _collectives(depths: Sequence[Depth], compiled: Sequence[Compiled]) -> tuple[Collective, ...]:
    found = [{(c.kind, c.axes, c.over_dcn): c for c in one.collectives} for one in compiled]
    out = []
    for key in dict.fromkeys(key for one in found for key in one):
        each = [one.get(key) for one in found]
        count = weighted(depths, [c.count if c else 0 for c in each])
        size = weighted(depths, [c.bytes if c else 0 for c in each])
        if count > 0 and size > 0:
            out.append(Collective(*key, round(count), size))
    return tuple(sorted(out, key=lambda c: -c.bytes))


def _kernels(depths: Sequence[Depth], compiled: Sequence[Compiled]) -> tuple[Kernel, ...]:
    found = [{kernel.name: kernel for kernel in one.kernels} for one in compiled]
    out = []
    for name in dict.fromkeys(name for one in found for name in one):
        each = [one.get(name) or Kernel(name, 0, 0.0, 0.0, 0.0) for one in found]
        out.append(
            Kernel(
                name,
                round(weighted(depths, [kernel.count for kernel in each])),
                weighted(depths, [kernel.flops for kernel in each]),
                weighted(depths, [kernel.bytes for kernel in each]),
                weighted(depths, [kernel.seconds for kernel in each]),
            )
        )
    return tuple(sorted(out, key=lambda kernel: -kernel.seconds))


def _largest(depths: Sequence[Depth], compiled: Sequence[Compiled]) -> tuple[Temporary, ...]:
    """The temporaries by name. One that a longer compile has more often is extrapolated; one that not every
    compile shows, because others crowd it out there, is taken as it is."""
    found = [{(t.name, t.shape): t for t in one.largest} for one in compiled]
    out = []
    for key in dict.fromkeys(key for one in found for key in one):
        each = [one[key] for one in found if key in one]
        last = each[-1]
        if len(each) == len(compiled):
            count = weighted(depths, [t.count for t in each])
            size = weighted(depths, [t.bytes for t in each])
            last = Temporary(*key, max(1, round(count)), size) if size > 0 else last
        out.append(last)
    return tuple(sorted(out, key=lambda t: -t.bytes)[:SHOWN])
