"""Bytes of HBM that a compiled program's operations read and write."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from compiler.plan.hlo.overlap import Overlap, kept
from compiler.plan.hlo.parse import Array, Instruction, Module

NO_DATA = frozenset(("parameter", "constant", "tuple", "get-tuple-element", "bitcast"))
NO_ARRAYS = frozenset(("after-all", "add-dependency", "opt-barrier", "domain", "partition-id", "replica-id"))
IN_PARTS = frozenset(("while", "call", "conditional", "async"))
"""Operations whose parts are counted in their place."""
NO_WORK = re.compile(r'custom_call_target="(?:AllocateBuffer|ConcatBitcast|PrepareAsyncCall(?:Start|Done))"')
"""Custom calls that only reserve memory, or name what lies there already."""
SLICES = frozenset(("slice", "dynamic-slice", "gather"))
VIEWS = frozenset(("bitcast", "reshape", "copy", "transpose"))
"""What may stand between a parameter and its slice within a fusion."""


class Traffic:
    """Bytes of a module's operations."""

    def __init__(self, module: Module) -> None:
        self._module = module
        self._overlap = Overlap(module)
        self._users: dict[str, dict[str, list[Instruction]]] = {}

    def bytes(self, instruction: Instruction, computation: str) -> float:
        """Of one operation: its operands and results, as far as they lie in HBM. Of an array that is only
        sliced, or updated in part, the part. An asynchronous operation counts where it starts.

        Args:
            computation: the name of the one that it stands in.
        """
        opcode = instruction.opcode.removesuffix("-start")
        if opcode in NO_DATA | NO_ARRAYS | IN_PARTS or opcode.endswith(("-done", "-update")):
            return 0.0
        part = self._overlap.part(instruction)
        if part == "done" or (opcode == "custom-call" and NO_WORK.search(instruction.attributes)):
            return 0.0
        operands = [self._instruction(computation, name) for name in instruction.operands]
        read = [_in_hbm(operand.arrays) if operand else 0.0 for operand in operands]
        results = _results(instruction, len(operands))
        if part:
            # What a collective already holds passes from one part to the next.
            old, new = kept(instruction)
            inputs = (size for n, size in enumerate(read) if part == "start" or n not in old)
            return sum(inputs) + sum(_in_hbm((array,)) for n, array in enumerate(results) if n not in new)
        if opcode == "fusion" and instruction.calls:
            callee = instruction.calls[0]
            needed = (self._read(callee, number) for number in range(len(read)))
            written = map(min, (_in_hbm((array,)) for array in results), self._written(callee, len(results)))
            return math.fsum(map(min, read, needed)) + math.fsum(written)
        if opcode in SLICES and read:
            return min(read[0], _size(results)) + sum(read[1:]) + _in_hbm(results)
        if opcode == "dynamic-update-slice" and operands[1]:
            return sum(read[1:]) + min(_in_hbm(results), _size(operands[1].arrays))
        return sum(read) + _in_hbm(results)

    def _read(self, computation: str, number: int) -> float:
        """Bytes that a fused computation reads of a parameter at most; infinite for all of it."""
        parameter = next(
            instruction
            for instruction in self._module.computations[computation]
            if instruction.opcode == "parameter" and int(instruction.literal) == number
        )
        return self._touched(computation, parameter.name)

    def _touched(self, computation: str, name: str) -> float:
        """Bytes of a value that the instructions of a fused computation use."""
        total = 0.0
        for user in self._users_of(computation, name):
            if user.opcode in SLICES and name not in user.operands[1:]:
                total += _size(user.arrays)
            elif user.opcode in VIEWS and not user.root:
                total += self._touched(computation, user.name)
            elif user.opcode == "fusion":
                places = [place for place, operand in enumerate(user.operands) if operand == name]
                total += sum(self._read(user.calls[0], place) for place in places)
            elif user.opcode != "dynamic-update-slice" or name in user.operands[1:]:
                return math.inf
        return total

    def _written(self, computation: str, results: int) -> list[float]:
        """Bytes that a fused computation writes of each result at most; infinite for all of it."""
        root = next((i for i in self._module.computations[computation] if i.root), None)
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
            return _size(update.arrays) if update else math.inf
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


def _results(instruction: Instruction, operands: int) -> Sequence[Array]:
    """The arrays that an operation writes. One that is only started lists its operands before them (a copy
    after them), and last the scalars by which its end is found."""
    arrays = instruction.arrays
    if instruction.opcode == "copy-start":
        return arrays[:1]
    if instruction.opcode.endswith("-start") and instruction.opcode != "all-reduce-start":
        return tuple(array for array in arrays[operands:] if array.dimensions)
    return arrays


def _in_hbm(arrays: Sequence[Array]) -> float:
    return float(sum(array.bytes for array in arrays if array.memory_space == 0))


def _size(arrays: Sequence[Array]) -> float:
    return float(sum(array.bytes for array in arrays))
