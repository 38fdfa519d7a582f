"""Estimate a step from the results of its compiles."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import calibration, rates
from recipec.compiler.plan.bound import model_flops, rows
from recipec.compiler.plan.memory import memory, with_refusal
from recipec.compiler.plan.prices import priced
from recipec.compiler.plan.results import Compiled, Estimate, Timeline
from recipec.compiler.plan.timeline import timeline as timeline_of


def estimate(program: Program, compiled: Sequence[Compiled]) -> Estimate:
    """Return the estimate of a program.

    Args:
        compiled: the results of the compiles in `depth.parts`, in order: the first has all layers, the last
            was compiled to the end.
    """
    whole, few = with_refusal(compiled[0]), compiled[-1]
    accelerator = program.accelerator
    timeline = Timeline()
    if whole.out_of_memory is None:
        timeline = timeline_of(priced(whole.schedule, few.prices), rates.reached(accelerator.generation))
    lora = program.lora is not None
    measured = calibration.known(accelerator.generation, lora)
    seconds = timeline.seconds * (measured.factor if measured else 1.0)
    needed = model_flops(program, rows(program) * program.recipe.data.max_length) / accelerator.devices
    peak = accelerator.peak_flops_per_device
    return Estimate(
        layers=program.architecture.num_layers,
        compiled_layers=(few.layers,),
        memory=memory(program, compiled),
        flops=whole.flops,
        bytes=whole.bytes,
        timeline=timeline,
        seconds=seconds,
        interval=measured.interval if measured else rates.interval(accelerator.generation, lora),
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
