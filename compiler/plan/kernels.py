"""Estimate the time of custom kernels from their shapes, because libtpu gives no cycles for them.

Splash attention follows a cost model that `python -m scripts.step_times attention` fits to published timings
(scripts/published/attention.csv). It has a cost for each row of queries, for each block of queries and keys,
and for each query-key pair. The vector unit limits the pairs when heads are small, the matrix unit when heads
are large.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.hardware import Accelerator, generations
from recipec.compiler.plan.hlo.parse import Array, Module, executed
from recipec.compiler.plan.results import Kernel

DATA = Path(__file__).parents[1] / "data" / "kernels.json"
TARGET = 'custom_call_target="tpu_custom_call"'
NUMBERS = re.compile(r"(?:\.(?:\d+|clone))+$")
SPLASH = re.compile(r"splash_m[hq]a_(fwd|dq|dkv)(?:_|$)")
GROUPED = re.compile(r"ragged-dot-none|tgmm")
"""Kernels of experts: rows times their expert's weight, and the gradient of such a weight."""
PRODUCTS = {"fwd": 2, "dq": 3, "dkv": 4, "bwd": 5}
"""Matrix products for each block of queries and keys. fwd: q k and p v. dq: q k, do v and ds k. dkv: q k,
p do, do v and ds q. bwd: the whole backward pass in one kernel, as it was measured; two kernels compute q k
and do v twice."""
MATRIX_UNIT = 0.92
"""Share of the peak that the largest heads reach in the fit."""
LIKE = {"v4": "v5p"}
GROUPED_EFFICIENCY = 0.5
"""Assumed share of the peak that the experts' products reach. It is not measured."""


@dataclass(frozen=True)
class Attention:
    """The cost model of one generation, in seconds.

    Attributes:
        row: cost of a row of queries and a head, and the cost that each 128 of the head's size add.
        block: cost of a block of queries and keys.
        pair: cost of a query-key pair on the vector unit.
    """

    row: tuple[float, float]
    block: float
    pair: float

    def seconds(self, splash: Splash, peak_flops: float) -> float:
        """Return the seconds of one kernel on one device."""
        passes = _law()["backward"]
        row, block, pair = (1.0, 1.0, 1.0)
        if splash.phase != "fwd":
            part = PRODUCTS[splash.phase] / PRODUCTS["bwd"]
            row, block, pair = part * passes["row"], passes["block"], part * passes["pair"]
        matrix = 2 * PRODUCTS[splash.phase] * splash.head_size / (MATRIX_UNIT * peak_flops)
        return splash.heads * (
            row * (self.row[0] + self.row[1] * splash.head_size / 128) * splash.length
            + splash.visited * (block * self.block + splash.pairs * max(pair * self.pair, matrix))
        )


@dataclass(frozen=True)
class Splash:
    """A splash attention kernel.

    Attributes:
        phase: "fwd", "dq" or "dkv", or "bwd" for dq and dkv in one kernel.
        heads: query heads, times the rows of a batch.
        length: tokens of a row.
        head_size: H.
        visited: blocks of queries and keys of one head that are not masked.
        pairs: query-key pairs in a block.
    """

    phase: str
    heads: int
    length: int
    head_size: int
    visited: float
    pairs: float

    @property
    def flops(self) -> float:
        """FLOPs of its matrix products, counting whole blocks."""
        return 2.0 * PRODUCTS[self.phase] * self.heads * self.visited * self.pairs * self.head_size


@functools.cache
def _law() -> Any:
    return json.loads(DATA.read_text(encoding="utf-8"))


def attention(generation: str) -> Attention:
    """Return the cost model of a generation.

    A generation without published timings is assumed to do as much per cycle as v6e, and v4 as much as v5p.
    """
    known = _law()["attention"]
    like = generation if generation in known else LIKE.get(generation, "v6e")
    law = known[like]
    ghz = {name: data["compiler"]["cycles_ghz"] for name, data in generations().items()}
    slower = ghz[like] / ghz[generation]
    row, more = law["row"]
    return Attention((slower * row, slower * more), slower * law["block"], slower * law["pair"])


class KernelSeconds:
    """Seconds of kernels on one device of an accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._law = attention(accelerator.generation)
        self._peak, self._hbm = accelerator.peak_flops_per_device, accelerator.bandwidth_per_device

    def of(self, name: str, operands: Sequence[Array], results: Sequence[Array]) -> Kernel:
        """Return FLOPs, bytes and seconds of one kernel.

        FLOPs are known for splash attention and for the experts' products, and are 0 for other kernels. Bytes
        count each operand and result in HBM once, even if a kernel reads it again.
        """
        name, seconds, flops = NUMBERS.sub("", name), 0.0, 0.0
        if costs := splash(name, operands, results):
            flops, seconds = costs.flops, self._law.seconds(costs, self._peak)
        elif GROUPED.fullmatch(name):
            rows = max(array.dimensions[0] for array in operands if len(array.dimensions) == 2)
            flops = grouped_flops(rows, [*operands, *results])
            seconds = flops / (self._peak * GROUPED_EFFICIENCY)
        moved = sum(array.bytes for array in (*operands, *results) if array.memory_space == 0)
        return Kernel(name, 1, flops, moved, max(seconds, moved / self._hbm))

    def seconds(self, name: str, operands: Sequence[Array], results: Sequence[Array]) -> float:
        """Return the seconds of one kernel."""
        return self.of(name, operands, results).seconds


def kernels(module: Module, seconds: KernelSeconds, even: bool = False) -> tuple[Kernel, ...]:
    """Return all custom kernels by name, with loops counted in full.

    Args:
        even: as for `executed`.
    """
    by_name: dict[str, Kernel] = {}
    counts: dict[str, float] = {}
    for instruction, computation, times in executed(module, even):
        if instruction.opcode != "custom-call" or TARGET not in instruction.attributes:
            continue
        named = module.by_name[computation]
        operands = [array for name in instruction.operands for array in named[name].arrays]
        kernel_seconds = seconds.of(instruction.name, operands, instruction.arrays)
        old = by_name.get(kernel_seconds.name, Kernel(kernel_seconds.name, 0, 0.0, 0.0, 0.0))
        counts[old.name] = counts.get(old.name, 0.0) + times
        by_name[kernel_seconds.name] = replace(
            old,
            count=round(counts[old.name]),
            flops=old.flops + times * kernel_seconds.flops,
            bytes=old.bytes + times * kernel_seconds.bytes,
            seconds=old.seconds + times * kernel_seconds.seconds,
        )
    return tuple(sorted(by_name.values(), key=lambda kernel: kernel.name))


def splash(name: str, operands: Sequence[Array], results: Sequence[Array]) -> Splash | None:
    """Describe a causal splash attention kernel; return None for any other kernel.

    Args:
        operands: a table of blocks [1, Q, at most this many of K], for dK and dV [1, at most this many of Q,
            K]; possibly more tables; then queries [..., N, T, H] in blocks of T / Q.
        results: a kernel for dK and dV that also computes dQ returns dQ in parts, one for each block of keys.
    """
    phase = SPLASH.match(name)
    table = next((array for array in operands if len(array.dimensions) == 3), None)
    queries = next((array for array in operands if array.dtype in ("bf16", "f32", "f16")), None)
    if phase is None or table is None or queries is None or table is queries:
        return None
    _, rows, columns = table.dimensions
    blocks, most = (columns, rows) if phase[1] == "dkv" else (rows, columns)
    *batch, length, size = queries.dimensions
    keys = next(array for array in operands[operands.index(queries) + 1 :] if array.dtype == queries.dtype)
    # With cp, a device has all keys and a part of the queries. All parts take the same time.
    parts = keys.dimensions[-2] // length
    if phase[1] != "dkv":
        blocks *= parts
    elif parts * most >= blocks:
        most = blocks
    visited = sum(min(block + 1, most) for block in range(blocks)) / parts
    whole = phase[1] == "dkv" and any(len(result.dimensions) > len(queries.dimensions) for result in results)
    return Splash(
        "bwd" if whole else phase[1], math.prod(batch), length, size, visited, (parts * length / blocks) ** 2
    )


def grouped_flops(rows: int, arrays: Sequence[Array]) -> float:
    """Return the FLOPs of products of `rows` rows, each with one expert's weight in an array [E, in, out]."""
    return next((2.0 * rows * math.prod(a.dimensions[1:]) for a in arrays if len(a.dimensions) == 3), 0.0)
