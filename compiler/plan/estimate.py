"""A step's estimate, from what was compiled of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import rates
from recipec.compiler.plan.bound import model_flops, rows
from recipec.compiler.plan.prices import priced
from recipec.compiler.plan.results import Compiled, Estimate, Memory, Timeline
from recipec.compiler.plan.timeline import timeline as timeline_of


def estimate(program: Program, compiled: Sequence[Compiled]) -> Estimate:
    """The figures of a program.

    Args:
        compiled: the results of `depth.parts`, in their order: the first has all layers, the last was
            compiled to the end.
    """
    whole, few = _with_refusal(compiled[0]), compiled[-1]
    accelerator = program.accelerator
    timeline = Timeline()
    if whole.out_of_memory is None:
        timeline = timeline_of(priced(whole.schedule, few.prices), rates.reached(accelerator.generation))
    seconds = timeline.seconds
    needed = model_flops(program, rows(program) * program.recipe.data.max_length) / accelerator.devices
    peak = accelerator.peak_flops_per_device
    by_shape = whole.weights + whole.adapters + whole.optimizer + whole.batch
    return Estimate(
        layers=program.architecture.num_layers,
        compiled_layers=(few.layers,),
        memory=Memory(
            weights=whole.weights,
            adapters=whole.adapters,
            optimizer=whole.optimizer,
            batch=whole.batch,
            padding=max(0.0, whole.arguments - by_shape),
            temporaries=whole.temporaries,
            code=_code(whole, few),
            available=accelerator.hbm_bytes_per_device,
        ),
        flops=whole.flops,
        bytes=whole.bytes,
        timeline=timeline,
        seconds=seconds,
        interval=rates.interval(accelerator.generation, program.lora is not None),
        peak_flops=peak,
        bandwidth=accelerator.bandwidth_per_device,
        model_flops=needed,
        mfu=needed / (seconds * peak) if seconds else 0.0,
        rows=rows(program),
        row_length=program.recipe.data.max_length,
        collectives=whole.collectives,
        kernels=tuple(sorted(whole.kernels, key=lambda kernel: -kernel.seconds)),
        largest=whole.largest,
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


def _code(whole: Compiled, few: Compiled) -> float:
    """The code of all layers, of as many bytes an instruction as that of a few. docs/benchmarks.md has it
    beside the code of all layers compiled to the end."""
    if few.layers == whole.layers or not few.instructions:
        return whole.code
    return few.code * whole.instructions / few.instructions + whole.code
