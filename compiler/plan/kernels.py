"""Time of the custom kernels of a compiled program, of which its compiler knows nothing.

All of this is estimated from the kernels' shapes: none was run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace

from recipec.compiler.plan.hlo.parse import Array, Module
from recipec.compiler.plan.hlo.walk import executed
from recipec.compiler.plan.results import Kernel

EFFICIENCY = 0.5
"""Share of the peak that splash attention is taken to reach. No measurement stands behind it, only this: for
each pair of a query and a key, the kernel also takes a maximum, an exponential, two masks and a sum on the
vector unit, which at a head size of 128 takes about as long as the products themselves."""

TARGET = 'custom_call_target="tpu_custom_call"'
NUMBERS = re.compile(r"(?:\.(?:\d+|clone))+$")
SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)(?:_|$)")
GROUPED = re.compile(r"ragged-dot-none|tgmm")
"""Of experts: rows with the weight of their expert, and the gradient to such a weight."""
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4}
"""Matrix products for each block of queries and keys: q k and p v; q k, do v and ds k; q k, p do, do v and
ds q."""


def kernels(module: Module, peak_flops: float, bandwidth: float, filled: float = 1.0) -> tuple[Kernel, ...]:
    """All of them, loops counted, by name. Of a kernel other than splash attention and the experts' products
    the FLOPs are not known and count as 0. Bytes are those of each operand and result in HBM once, whatever a
    kernel reads again.

    Args:
        peak_flops: of one device, FLOP/s.
        bandwidth: of its HBM, bytes/s.
        filled: share of the experts' rows that are tokens': the kernels pass over the others.
    """
    found: dict[str, Kernel] = {}
    for e in executed(module):
        if e.instruction.opcode != "custom-call" or TARGET not in e.instruction.attributes:
            continue
        named = module.by_name[e.computation]
        operands = [array for name in e.instruction.operands for array in named[name].arrays]
        name = NUMBERS.sub("", e.instruction.name)
        results = e.instruction.arrays
        flops, share = splash_flops(name, operands), {0: 1.0}
        if GROUPED.fullmatch(name):
            rows = max(array.dimensions[0] for array in operands if len(array.dimensions) == 2)
            flops, share = filled * grouped_flops(rows, [*operands, *results]), {rows: filled}
        moved = sum(
            array.bytes * share.get(next(iter(array.dimensions), 0), 1.0)
            for array in (*operands, *results)
            if array.memory_space == 0
        )
        seconds = max(flops / (peak_flops * EFFICIENCY), moved / bandwidth)
        one = found.get(name, Kernel(name, 0, 0.0, 0.0, 0.0))
        found[name] = replace(
            one,
            count=one.count + e.times,
            flops=one.flops + e.times * flops,
            bytes=one.bytes + e.times * moved,
            seconds=one.seconds + e.times * seconds,
        )
    return tuple(sorted(found.values(), key=lambda one: one.name))


def splash_flops(name: str, operands: Sequence[Array]) -> float:
    """Of the matrix products of a splash attention kernel that is causal, whole blocks counted; 0.0 for any
    other kernel.

    Args:
        operands: a table of blocks [1, Q, at most this many of K], for dK and dV [1, at most this many of Q,
            K], perhaps more tables, then queries [..., N, T, H] in blocks of T / Q.
    """
    phase = SPLASH.match(name)
    table = next((array for array in operands if len(array.dimensions) == 3), None)
    queries = next((array for array in operands if array.dtype in ("bf16", "f32", "f16")), None)
    if phase is None or table is None or queries is None or table is queries:
        return 0.0
    _, rows, columns = table.dimensions
    blocks, most = (columns, rows) if phase[1] == "dkv" else (rows, columns)
    visited = sum(min(block + 1, most) for block in range(blocks))
    *batch, length, size = queries.dimensions
    pairs = visited * (length / blocks) ** 2
    return 2.0 * PRODUCTS[phase[1]] * math.prod(batch) * pairs * size


def grouped_flops(rows: int, arrays: Sequence[Array]) -> float:
    """Of the products of so many rows, each with one expert's weight, the one array [E, in, out]."""
    return next((2.0 * rows * math.prod(a.dimensions[1:]) for a in arrays if len(a.dimensions) == 3), 0.0)
