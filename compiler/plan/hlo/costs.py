"""Count what a compiled program computes and moves: FLOPs of products, bytes of HBM, and collectives.

A device's number is its position in the flattened mesh, in which the last axis varies fastest.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from recipec.compiler.plan.hlo.parse import COLLECTIVES, Array, Instruction, Module, bytes_of, executed, kept
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
    totals: dict[tuple[str, tuple[str, ...], bool], Collective] = {}
    for instruction, computation, times in executed(module):
        if module.part(instruction) in ("step", "done"):
            continue
        for exchange in exchanges(module, instruction, computation, axes, slices, across):
            key = (exchange.kind, exchange.axes, exchange.over_dcn)
            total = totals.get(key, Collective(*key, count=0, bytes=0.0))
            totals[key] = replace(
                total, count=total.count + round(times), bytes=total.bytes + times * exchange.bytes
            )
    return tuple(
        sorted(totals.values(), key=lambda collective: (-collective.bytes, collective.kind, collective.axes))
    )


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
    match = TRANSFER.search(instruction.attributes)
    kind = match[1].lower().replace("_", "-") if match else ""
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
    axes_crossed = set()
    stride = math.prod(axes.values())
    for name, size in axes.items():
        stride //= size
        if any(source // stride % size != target // stride % size for source, target in pairs):
            axes_crossed.add(name)
    return tuple(name for name in axes if name in axes_crossed)


def _mesh_groups(mesh: str, device_ids: str, used: str) -> Groups:
    """Read groups that are written as axes of a mesh of the compiler's own: mesh['a'=2,'b'=4] {'b'}.

    'a':(2)4 is a part of axis a: the part has size 4, and the part before it has size 2.
    """
    sizes = {name: int(size) for name, size in MESH_AXIS.findall(mesh)}
    parts = USED_AXIS.findall(used)
    shape: list[tuple[int, bool]] = []
    for name, size in sizes.items():
        done = 1
        for _, before, part in sorted((p for p in parts if p[0] == name), key=lambda p: int(p[1] or 1)):
            first, length = int(before or 1), int(part or size)
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


KERNEL = 'custom_call_target="tpu_custom_call"'


def costs(module: Module, even: bool = False) -> tuple[float, float]:
    """Return FLOPs of matrix products, and bytes that all operations read and write in HBM.

    Loops are counted in full. Custom kernels count as 0.

    Args:
        even: as for `executed`.
    """
    products, traffic = Products(module), Traffic(module)
    flops = moved = 0.0
    for instruction, computation, times in executed(module, even):
        if KERNEL not in instruction.attributes:
            flops += times * products.flops(instruction, computation)
            moved += times * traffic.bytes(instruction, computation)
    return flops, moved


LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")
PRECISION = re.compile(r"\boperand_precision=\{(\w+),(\w+)\}")
PARTS = {"highest": 3, "high": 2}
"""How many bfloat16 numbers the MXU splits a float32 number into, by precision."""
CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")


class Products:
    """FLOPs of a module's instructions.

    Args:
        passes: count a float32 product as many times as the MXU computes it at the requested precision.
    """

    def __init__(self, module: Module, passes: bool = False) -> None:
        self._module = module
        self._passes = passes
        self._of_computation: dict[str, float] = {}

    def flops(self, instruction: Instruction, computation: str) -> float:
        """Return the FLOPs of one instruction; for a fusion, of all its products together.

        Args:
            computation: the name of the computation that contains the instruction.
        """
        if instruction.opcode == "fusion":
            return sum(self._all(name) for name in instruction.calls)
        if instruction.opcode in ("convolution", "dot"):
            named = self._module.by_name[computation]
            left, right = (named[operand] for operand in instruction.operands[:2])
            flops = product_flops(instruction, _shape(left), _shape(right))
            return flops * (_mxu_passes(instruction, left, right) if self._passes else 1)
        return 0.0

    def _all(self, computation: str) -> float:
        if computation not in self._of_computation:
            instructions = self._module.body(computation)
            total = math.fsum(self.flops(instruction, computation) for instruction in instructions)
            self._of_computation[computation] = total
        return self._of_computation[computation]


def product_flops(instruction: Instruction, left: tuple[int, ...], right: tuple[int, ...]) -> float:
    """Return the FLOPs of a dot or a convolution, 2 for each multiplication.

    Multiplications with a convolution's padding are neither computed nor counted.

    Args:
        left, right: shapes of the operands.
    """
    result = _shape(instruction)
    if instruction.opcode == "dot":
        contracted = CONTRACTED.search(instruction.attributes)
        dimensions = [int(n) for n in contracted[1].split(",") if n] if contracted else []
        return 2.0 * math.prod(result) * math.prod(left[n] for n in dimensions)
    labels = LABELS.search(instruction.attributes)
    if labels is None:
        return 0.0
    inputs, kernels, results = labels[1], labels[2], labels[3]
    groups = dict(GROUPS.findall(instruction.attributes))
    count = left[inputs.index("f")] // int(groups.get("feature", 1)) * right[kernels.index("o")]
    count *= left[inputs.index("b")] // int(groups.get("batch", 1))
    for axis, window in enumerate(_windows(instruction, sum(label.isdigit() for label in results))):
        size, label = left[inputs.index(str(axis))], str(axis)
        count *= _valid(size, right[kernels.index(label)], result[results.index(label)], *window)
    return 2.0 * count


def _mxu_passes(instruction: Instruction, left: Instruction, right: Instruction) -> int:
    """Return how many bfloat16 products the MXU computes for one product at its precision.

    The MXU splits float32 operands into bfloat16 parts, and multiplies the pairs of parts that matter: 6
    pairs for two float32 operands at the highest precision, 1 at the default precision.
    """
    precision = PRECISION.search(instruction.attributes)
    if precision is None:
        return 1
    wide = [array.dtype == "f32" for operand in (left, right) for array in operand.arrays[:1]]
    parts = [
        PARTS.get(name, 1) if is_wide else 1 for name, is_wide in zip(precision.groups(), wide, strict=True)
    ]
    most = max(parts)
    return sum(i + j < most for i in range(parts[0]) for j in range(parts[1]))


def _shape(instruction: Instruction) -> tuple[int, ...]:
    return instruction.arrays[0].dimensions if instruction.arrays else ()


def _windows(instruction: Instruction, axes: int) -> list[tuple[int, int, int, int]]:
    """Return (stride, padding before, input dilation, kernel dilation) for each spatial axis."""
    match = WINDOW.search(instruction.attributes)
    fields = dict(item.split("=") for item in match[1].split()) if match else {}

    def each(name: str, default: str) -> list[str]:
        return fields[name].split("x") if name in fields else [default] * axes

    return [
        (int(stride), int(pad.split("_")[0]), int(left), int(right))
        for stride, pad, left, right in zip(
            each("stride", "1"),
            each("pad", "0_0"),
            each("lhs_dilate", "1"),
            each("rhs_dilate", "1"),
            strict=True,
        )
    ]


@functools.cache
def _valid(inputs: int, kernel: int, outputs: int, stride: int, pad: int, left: int, right: int) -> int:
    """Count the pairs of an output and a kernel position that meet an element of the input, along one axis.

    Args:
        inputs, kernel, outputs: sizes.
        pad: positions before the input.
        left, right: dilations of the input and the kernel.
    """
    last = (inputs - 1) * left
    count = 0
    for position in range(kernel):
        offset = position * right - pad
        first_output = max(0, -(offset // stride))
        last_output = min(outputs - 1, (last - offset) // stride)
        if left == 1:
            count += max(0, last_output - first_output + 1)
        else:
            met = range(first_output, last_output + 1)
            count += sum((output * stride + offset) % left == 0 for output in met)
    return count


NO_DATA = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast"))
NO_ARRAYS = frozenset(("after-all", "add-dependency", "opt-barrier", "domain", "partition-id", "replica-id"))
IN_PARTS = frozenset(("while", "call", "conditional", "async"))
"""Operations that are not counted themselves, because their parts are."""
NO_WORK = re.compile(r'custom_call_target="(?:AllocateBuffer|ConcatBitcast|PrepareAsyncCall(?:Start|Done))"')
"""Custom calls that only reserve memory, or refer to memory that is already filled."""
SLICES = frozenset(("slice", "dynamic-slice", "gather"))
VIEWS = frozenset(("bitcast", "reshape", "copy", "transpose"))
"""Operations that may be between a parameter and its slice within a fusion."""


class Traffic:
    """Bytes of a module's operations."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._users: dict[str, dict[str, list[Instruction]]] = {}

    def bytes(self, instruction: Instruction, computation: str) -> float:
        """Return the bytes of one operation's operands and results that are in HBM.

        If an array is only sliced or partly updated, only that part counts. An asynchronous operation counts
        at its start.

        Args:
            computation: the name of the computation that contains the operation.
        """
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in NO_DATA | NO_ARRAYS | IN_PARTS or opcode.endswith(("-done", "-update")):
            return 0.0
        part = self._module.part(instruction)
        if part == "done" or (opcode == "custom-call" and NO_WORK.search(instruction.attributes)):
            return 0.0
        operands = [self._instruction(computation, name) for name in instruction.operands]
        read = [_in_hbm(operand.arrays) if operand else 0.0 for operand in operands]
        results = results_of(instruction, len(operands))
        if part:
            # The parts of a collective share these buffers, so they are counted only at its start.
            old, new = kept(instruction)
            inputs = (size for n, size in enumerate(read) if part == "start" or n not in old)
            return sum(inputs) + sum(_in_hbm((array,)) for n, array in enumerate(results) if n not in new)
        if opcode == "fusion" and instruction.calls:
            callee = instruction.calls[0]
            needed = (self._read(callee, number) for number in range(len(read)))
            written = map(min, (_in_hbm((array,)) for array in results), self._written(callee, len(results)))
            return math.fsum(map(min, read, needed)) + math.fsum(written)
        if opcode in SLICES and read:
            return min(read[0], bytes_of(results)) + sum(read[1:]) + _in_hbm(results)
        if opcode == "dynamic-update-slice" and operands[1]:
            return sum(read[1:]) + min(_in_hbm(results), bytes_of(operands[1].arrays))
        return sum(read) + _in_hbm(results)

    def _read(self, computation: str, number: int) -> float:
        """Return the most bytes that a fused computation reads of a parameter; infinite for all of it."""
        parameter = next(
            instruction
            for instruction in self._module.computations[computation]
            if instruction.opcode == "parameter" and int(instruction.literal) == number
        )
        return self._touched(computation, parameter.name)

    def _touched(self, computation: str, name: str) -> float:
        """Return the bytes of a value that the instructions of a fused computation use."""
        total = 0.0
        for user in self._users_of(computation, name):
            if user.opcode in SLICES and name not in user.operands[1:]:
                total += bytes_of(user.arrays)
            elif user.opcode in VIEWS and not user.root:
                total += self._touched(computation, user.name)
            elif user.opcode == "fusion":
                places = [place for place, operand in enumerate(user.operands) if operand == name]
                total += sum(self._read(user.calls[0], place) for place in places)
            elif user.opcode != "dynamic-update-slice" or name in user.operands[1:]:
                return math.inf
        return total

    def _written(self, computation: str, results: int) -> list[float]:
        """Return the most bytes that a fused computation writes of each result; infinite for all of it."""
        root = self._module.root(computation)
        if root is None:
            return [math.inf] * results
        if root.opcode != "tuple" or len(root.operands) != results:
            return [self._updated(computation, root)] * results if results == 1 else [math.inf] * results
        elements = (self._instruction(computation, operand) for operand in root.operands)
        return [self._updated(computation, element) for element in elements]

    def _updated(self, computation: str, instruction: Instruction | None) -> float:
        while instruction is not None and instruction.opcode in VIEWS:
            instruction = self._instruction(computation, instruction.operands[0])
        if instruction is None:
            return math.inf
        if instruction.opcode == "fusion":
            return self._written(instruction.calls[0], 1)[0]
        if instruction.opcode == "dynamic-update-slice":
            update = self._instruction(computation, instruction.operands[1])
            return bytes_of(update.arrays) if update else math.inf
        return math.inf

    def _instruction(self, computation: str, name: str) -> Instruction | None:
        return self._module.by_name[computation].get(name)

    def _users_of(self, computation: str, name: str) -> list[Instruction]:
        if computation not in self._users:
            users: dict[str, list[Instruction]] = {}
            for instruction in self._module.computations[computation]:
                for operand in dict.fromkeys(instruction.operands):
                    users.setdefault(operand, []).append(instruction)
            self._users[computation] = users
        return self._users[computation].get(name, [])


def results_of(instruction: Instruction, operands: int) -> Sequence[Array]:
    """Return the arrays that an operation writes.

    The result of a "-start" operation lists its operands first (a copy's operand second), then the written
    arrays, then scalars that its "-done" operation needs. Only the written arrays are returned.
    """
    arrays = instruction.arrays
    if instruction.opcode == "copy-start":
        return arrays[:1]
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        return tuple(array for array in arrays[operands:] if array.dimensions)
    return arrays


def _in_hbm(arrays: Sequence[Array]) -> float:
    return float(sum(array.bytes for array in arrays if array.memory_space == 0))
