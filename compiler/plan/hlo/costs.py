"""What a compiled program computes and moves."""

from __future__ import annotations

import re

from compiler.hardware import generations
from compiler.plan.hlo.parse import Module
from compiler.plan.hlo.products import Products
from compiler.plan.hlo.traffic import Traffic
from compiler.plan.hlo.walk import executed
from compiler.plan.results import Costs

KERNEL = 'custom_call_target="tpu_custom_call"'
WITHOUT_COST = re.compile(r'custom_call_target="(?:ConcatBitcast|PrepareAsyncCall(?:Start|Done))"')


def compiler_rates(generation: str) -> tuple[float, float]:
    """FLOP/s and bytes/s of a device that the compiler's own estimate of time rests on. `costs` with these
    figures gives seconds that can be added to the compiler's."""
    data = generations()[generation]["compiler"]
    return data["tflops"] * 1e12, data["gb_per_s"] * 1e9


def costs(module: Module, peak_flops: float, bandwidth: float) -> Costs:
    """Counts matrix products, and what every operation reads and writes in HBM; custom kernels count as
    nothing, and collectives take as long as their reading and writing, as in the compiler's analysis. Other
    than there, a product of float32 at a higher precision than the default takes all its passes.

    Args:
        peak_flops: of one device, FLOP/s.
        bandwidth: of its HBM, bytes/s.
    """
    products, work, traffic = Products(module), Products(module, passes=True), Traffic(module)
    totals, once = [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]
    for e in executed(module):
        if KERNEL in e.instruction.attributes:
            continue
        flops = products.flops(e.instruction, e.computation)
        moved = traffic.bytes(e.instruction, e.computation)
        seconds = max(work.flops(e.instruction, e.computation) / peak_flops, moved / bandwidth)
        for n, figure in enumerate((flops, moved, seconds)):
            totals[n] += e.times * figure
            once[n] += e.once * figure
    return Costs(*totals, *(total - first for total, first in zip(totals, once, strict=True)))


def seconds_taken_off(module: Module) -> int:
    """What the compiler's estimate of time is too small by: it counts some operations of which it knows no
    cost as -1 s. They appear where the compiler is left its full effort, and on tpu7x."""
    return sum(e.once for e in executed(module) if WITHOUT_COST.search(e.instruction.attributes))
