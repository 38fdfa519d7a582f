"""Find the collectives of a compiled program, and the mesh axes that they run over.

A device's number is its position in the flattened mesh, in which the last axis varies fastest.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from recipec.compiler.plan.hlo.parse import COLLECTIVES, Array, Instruction, Module, bytes_of, executed
from recipec.compiler.plan.results import Collective

MEGASCALE = '"xla_megascale_runtime"'
"""The handler of transfers between slices. libtpu compiles the program of one slice. In it, a collective over
all slices becomes a collective within the slice, and transfers over the network."""
TRANSFER = re.compile(r'_xla_megascale_transfer_type="([^"]*)"')
"""The collective that a transfer belongs to: "ALL_GATHER". Other words are kept unchanged."""
ONE_TO_ONE = "one-to-one"

Groups = list[tuple[int, ...]]
"""Devices that exchange data with each other."""


@dataclass(frozen=True)
class Exchange:
    """One collective.

    Attributes:
        kind, axes, over_dcn: as in `results.Collective`.
        bytes: bytes of the array that one device ends up with.
        groups: devices that exchange data with each other.
    """

    kind: str
    axes: tuple[str, ...]
    over_dcn: bool
    bytes: int
    groups: Groups


def collectives(
    module: Module, axes: Mapping[str, int], slices: int = 1, across: str = "dcn"
) -> tuple[Collective, ...]:
    """Return all collectives, those with most bytes first. Loops are counted in full.

    Args:
        axes: sizes of the mesh's axes, in order. Devices are numbered along them, the last axis fastest.
        slices: number of slices, which are joined over DCN along the axis `across`.
    """
    found: dict[tuple[str, tuple[str, ...], bool], Collective] = {}
    for instruction, computation, times in executed(module):
        if module.part(instruction) in ("step", "done"):
            continue
        for exchange in exchanges(module, instruction, computation, axes, slices, across):
            key = (exchange.kind, exchange.axes, exchange.over_dcn)
            one = found.get(key, Collective(*key, count=0, bytes=0.0))
            found[key] = replace(one, count=one.count + times, bytes=one.bytes + times * exchange.bytes)
    return tuple(sorted(found.values(), key=lambda one: (-one.bytes, one.kind, one.axes)))


def exchanges(
    module: Module,
    instruction: Instruction,
    computation: str,
    axes: Mapping[str, int],
    slices: int = 1,
    across: str = "dcn",
) -> Iterator[Exchange]:
    """Yield the collectives that one operation runs or starts.

    Args:
        computation: the name of the computation that contains the operation.
    """
    if slices > 1:
        axes = {name: size for name, size in axes.items() if name != across}
    for kind, inner, moved in _of(module, instruction, computation):
        partners = _partners_of(inner)
        groups = partners or _groups_of(inner, math.prod(axes.values()))
        over_dcn = inner.opcode == "recv"
        along = _axes_between(partners, axes) if partners else _axes_of(groups, axes)
        yield Exchange(kind, (across,) if over_dcn else along, over_dcn, moved, groups)


def _of(module: Module, instruction: Instruction, computation: str) -> Iterator[tuple[str, Instruction, int]]:
    """Yield (kind, instruction, bytes of the result on one device) for each collective of an operation."""
    kind = instruction.opcode.removesuffix("-start")
    if kind in COLLECTIVES:
        moved = bytes_of(_result(instruction))
        if kind == "ragged-all-to-all":
            # One of operand and result has room for the most rows possible; the other has the rows sent.
            moved = min(moved, bytes_of(module.by_name[computation][instruction.operands[0]].arrays))
        yield kind, instruction, moved
    elif kind == "recv" and MEGASCALE in instruction.attributes:
        # The last array belongs to the transfer itself.
        yield _transfer(instruction), instruction, bytes_of(instruction.arrays[:-1])
    elif kind == "fusion":
        yield from _fused(module, instruction.calls)


def _transfer(instruction: Instruction) -> str:
    said = TRANSFER.search(instruction.attributes)
    kind = said[1].lower().replace("_", "-") if said else ""
    return "collective-permute" if kind == ONE_TO_ONE else kind or "transfer"


def _fused(module: Module, calls: Sequence[str]) -> Iterator[tuple[str, Instruction, int]]:
    for body in map(module.body, calls):
        for instruction in body:
            if instruction.opcode in COLLECTIVES:
                slices = (i for i in body if i.opcode == "dynamic-slice")
                part = next((i for i in slices if i.operands[:1] == (instruction.name,)), None)
                if instruction.opcode == "all-reduce" and part is not None:
                    # A reduce-scatter: each device keeps its part of the sum.
                    yield "reduce-scatter", instruction, bytes_of(part.arrays)
                else:
                    yield instruction.opcode, instruction, bytes_of(instruction.arrays)
            elif instruction.opcode == "fusion":
                yield from _fused(module, instruction.calls)


def _result(instruction: Instruction) -> Sequence[Array]:
    """Return the arrays that a collective ends with. A "-start" operation lists its operands before them."""
    arrays = instruction.arrays
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return arrays
    count = len(instruction.operands)
    return arrays[count : 2 * count]


EXPLICIT = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
BRACES = re.compile(r"\{([\d,]+)\}")
IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
MESH_GROUPS = re.compile(r"\breplica_groups=mesh\[([^\]]*)\](?:, ?device_ids=\(([^()]*)\))? ?\{([^}]*)\}")
MESH_AXIS = re.compile(r"'([^']+)'=(\d+)")
USED_AXIS = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def _groups_of(instruction: Instruction, devices: int) -> Groups:
    """Return a collective's groups; one group of all devices where the text names none."""
    attributes = instruction.attributes
    mesh = MESH_GROUPS.search(attributes)
    if mesh:
        return _mesh_groups(*mesh.groups(default=""))
    iota = IOTA.search(attributes)
    if iota:
        sizes, length = _numbers(iota[2]), _numbers(iota[1])[-1]
        order = _numbers(iota[3] or "") or range(len(sizes))
        return _transposed(range(math.prod(sizes)), sizes, order, length)
    explicit = EXPLICIT.search(attributes)
    groups = [tuple(_numbers(group)) for group in BRACES.findall(explicit[1])] if explicit else []
    return groups or [tuple(range(devices))]


def _partners_of(instruction: Instruction) -> Groups:
    """Return pairs of a source and a target, [] for a collective that is not a permutation."""
    pairs = PAIRS.search(instruction.attributes)
    return [tuple(_numbers(pair)) for pair in BRACES.findall(pairs[1])] if pairs else []


def _axes_of(groups: Groups, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes that the groups run along, or () if no set of axes gives these groups.

    Axes of size 1 are never among them.

    Args:
        axes: the mesh's sizes, in order.
    """
    wanted = {frozenset(group) for group in groups}
    names = [name for name, size in axes.items() if size > 1]
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            shape = [(size, name in chosen) for name, size in axes.items()]
            if {frozenset(group) for group in _over(range(math.prod(axes.values())), shape)} == wanted:
                return chosen
    return ()


def _axes_between(pairs: Groups, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Return the axes along which a source and its target have different coordinates."""
    found = set()
    stride = math.prod(axes.values())
    for name, size in axes.items():
        stride //= size
        if any(source // stride % size != target // stride % size for source, target in pairs):
            found.add(name)
    return tuple(name for name in axes if name in found)


def _mesh_groups(mesh: str, device_ids: str, used: str) -> Groups:
    """Read groups that are written as axes of a mesh of the compiler's own: mesh['a'=2,'b'=4] {'b'}.

    'a':(2)4 is a part of axis a: the part has size 4, and the part before it has size 2.
    """
    sizes = {name: int(size) for name, size in MESH_AXIS.findall(mesh)}
    parts = USED_AXIS.findall(used)
    shape: list[tuple[int, bool]] = []
    for name, size in sizes.items():
        done = 1
        for _, before, own in sorted((p for p in parts if p[0] == name), key=lambda p: int(p[1] or 1)):
            first, length = int(before or 1), int(own or size)
            shape += [(first // done, False), (length, True)]
            done = first * length
        shape.append((size // done, False))
    return _over(_numbers(device_ids) or range(math.prod(sizes.values())), shape)


def _over(devices: Sequence[int], shape: Sequence[tuple[int, bool]]) -> Groups:
    """Return the groups along chosen dimensions of an array of devices.

    Args:
        shape: each dimension's size, and whether a group runs along it.
    """
    sizes, chosen = [size for size, _ in shape], [n for n, (_, along) in enumerate(shape) if along]
    order = sorted(range(len(sizes)), key=chosen.__contains__)
    return _transposed(devices, sizes, order, math.prod(sizes[n] for n in chosen))


def _transposed(devices: Sequence[int], sizes: Sequence[int], order: Sequence[int], length: int) -> Groups:
    """Return rows of a length of an array of devices, with its dimensions in another order."""
    import numpy as np

    rows = np.reshape(devices, sizes).transpose(order).reshape(-1, length)
    return [tuple(row) for row in rows.tolist()]


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
