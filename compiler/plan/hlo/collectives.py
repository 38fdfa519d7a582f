"""Which collectives a compiled program runs, over which axes of the mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from compiler.plan.hlo.groups import axes_between, axes_of, groups_of, partners_of
from compiler.plan.hlo.overlap import COLLECTIVES, Overlap
from compiler.plan.hlo.parse import Array, Instruction, Module
from compiler.plan.hlo.walk import executed
from compiler.plan.results import Collective

MEGASCALE = '"xla_megascale_runtime"'
"""The handler of transfers between slices. libtpu compiles the program of one slice, in which a collective
over all of them becomes one within the slice, and transfers over the network."""
TRANSFER = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')
"""What such a transfer is a part of: "ALL_GATHER". A word that is no collective's is shown as it is."""
ONE_TO_ONE = "one-to-one"


def collectives(
    module: Module, axes: Mapping[str, int], slices: int = 1, across: str = "dcn"
) -> tuple[Collective, ...]:
    """All of them, loops counted, those that take most bytes first.

    Args:
        axes: the mesh's, in order. Devices are numbered along them, the last axis fastest.
        slices: that are joined over DCN along the axis `across`.
    """
    if slices > 1:
        axes = {name: size for name, size in axes.items() if name != across}
    found: dict[tuple[str, tuple[str, ...], bool], Collective] = {}
    for kind, instruction, size, times in _all(module):
        partners = partners_of(instruction)
        groups = partners or groups_of(instruction, math.prod(axes.values()))
        over_dcn = instruction.opcode == "recv"
        along = axes_between(partners, axes) if partners else axes_of(groups, axes)
        key = (kind, (across,) if over_dcn else along, over_dcn)
        one = found.get(key, Collective(*key, count=0, bytes=0.0))
        found[key] = replace(one, count=one.count + times, bytes=one.bytes + times * size)
    return tuple(sorted(found.values(), key=lambda one: (-one.bytes, one.kind, one.axes)))


def _all(module: Module) -> Iterator[tuple[str, Instruction, int, int]]:
    """Kind, instruction, bytes of the result on one device and how often it runs, of each collective."""
    overlap = Overlap(module)
    for e in executed(module):
        kind = e.instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            yield kind, e.instruction, _size(_result(e.instruction)), e.times
        elif kind == "recv" and MEGASCALE in e.instruction.attributes:
            # The last array is the transfer's own.
            yield _transfer(e.instruction), e.instruction, _size(e.instruction.arrays[:-1]), e.times
        elif kind == "fusion" and overlap.part(e.instruction) in ("", "start"):
            for kind, instruction, size in _fused(module, e.instruction.calls):
                yield kind, instruction, size, e.times


def _transfer(instruction: Instruction) -> str:
    said = TRANSFER.search(instruction.attributes)
    kind = said[1].lower().replace("_", "-") if said else ""
    return "collective-permute" if kind == ONE_TO_ONE else kind or "transfer"


def _fused(module: Module, calls: Sequence[str]) -> Iterator[tuple[str, Instruction, int]]:
    for body in (module.computations.get(name, ()) for name in calls):
        for instruction in body:
            if instruction.opcode in COLLECTIVES:
                part = next((i for i in body if _is_part(i, instruction)), None)
                if instruction.opcode == "all-reduce" and part is not None:
                    # A reduce-scatter: of the sum, a device keeps its part.
                    yield "reduce-scatter", instruction, _size(part.arrays)
                else:
                    yield instruction.opcode, instruction, _size(instruction.arrays)
            elif instruction.opcode == "fusion":
                yield from _fused(module, instruction.calls)


def _is_part(instruction: Instruction, whole: Instruction) -> bool:
    return instruction.opcode == "dynamic-slice" and instruction.operands[:1] == (whole.name,)


def _result(instruction: Instruction) -> Sequence[Array]:
    """The arrays that a collective ends with: one that is only started lists its operands before them."""
    arrays = instruction.arrays
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return arrays
    count = len(instruction.operands)
    return arrays[count : 2 * count]


def _size(arrays: Sequence[Array]) -> int:
    return sum(array.bytes for array in arrays)
