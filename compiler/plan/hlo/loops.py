"""How often a compiled program's loops run."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compiler.plan.hlo.parse import Instruction

KNOWN = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
DIRECTION = re.compile(r"\bdirection=(\w\w)")
INDEX = re.compile(r"\bindex=(\d+)")
INTEGER = re.compile(r"-?\d+$")
SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclass(frozen=True)
class _Carried:
    """An element of the tuple that a loop carries, as it was when the iteration began, plus a number."""

    index: int
    plus: int = 0


Value = int | _Carried | None
"""What is known of an integer: the number itself, how it follows from what the loop carries, nothing."""
Argument = Callable[[], Value] | None
"""A parameter of a computation, worked out when asked for; None for the tuple that a loop carries."""


def trip_counts(computations: Mapping[str, tuple[Instruction, ...]]) -> dict[str, int]:
    """By the name of the loop's body, of the loops whose count the compiler noted, and of those that count
    up to (or down to) a constant in equal steps. Where a counter's beginning or step is not seen, it is
    taken to be that of jax's own loops: from 0 by 1."""
    program = _Program(computations)
    counts = {}
    for name, instructions in computations.items():
        for loop in instructions:
            if loop.opcode == "while":
                known = KNOWN.search(loop.attributes)
                count = int(known[1]) if known else program.count(name, loop)
                if count is not None:
                    counts[_called(loop, "body")] = count
    return counts


def _called(instruction: Instruction, attribute: str) -> str:
    match = re.search(rf"\b{attribute}=%([^\s,}}]+)", instruction.attributes)
    return match[1] if match else ""


class _Program:
    """Computations whose integers can be followed."""

    def __init__(self, computations: Mapping[str, tuple[Instruction, ...]]) -> None:
        self._computations = computations
        self._by_name: dict[str, dict[str, Instruction]] = {}

    def count(self, caller: str, loop: Instruction) -> int | None:
        """How often a loop runs; None where that is not to be seen."""
        compared = self._comparison(_called(loop, "condition"))
        if compared is None:
            return None
        counter, direction, end = compared

        def initial(index: int) -> Value:
            return self._element(caller, loop.operands[0], index, [])

        limit = end if isinstance(end, int) else initial(end.index)
        first = initial(counter.index)
        body = _called(loop, "body")
        root = self._root(body)
        after = self._element(body, root.name, counter.index, [None]) if root else None
        step = after.plus if isinstance(after, _Carried) and after.index == counter.index else 1
        if not isinstance(limit, int):
            return None
        return _iterations(first if isinstance(first, int) else 0, step, direction, limit - counter.plus)

    def _comparison(self, condition: str) -> tuple[_Carried, str, int | _Carried] | None:
        """The counter, the direction and the other side of the comparison that ends a loop."""
        name, arguments = condition, list[Argument]([None])
        root = self._root(name)
        while root is not None and root.opcode in ("fusion", "call") and root.calls:
            arguments = self._arguments(name, root, arguments)
            name = root.calls[0]
            root = self._root(name)
        if root is None or root.opcode != "compare" or len(root.operands) != 2:
            return None
        direction = DIRECTION.search(root.attributes)
        left, right = (self._value(name, operand, arguments) for operand in root.operands)
        if direction is None or left is None or right is None:
            return None
        if isinstance(left, _Carried):
            return left, direction[1], right
        return (right, MIRRORED[direction[1]], left) if isinstance(right, _Carried) else None

    def _value(self, computation: str, name: str, arguments: list[Argument]) -> Value:
        """What is known of an instruction's result."""
        instruction = self._instruction(computation, name)
        if instruction is None or len(instruction.arrays) != 1 or instruction.arrays[0].dimensions:
            return None
        operands = instruction.operands
        if instruction.opcode == "constant" and INTEGER.match(instruction.literal):
            return int(instruction.literal)
        if instruction.opcode == "parameter":
            argument = (
                arguments[int(instruction.literal)] if int(instruction.literal) < len(arguments) else None
            )
            return argument() if argument else None
        if instruction.opcode in SAME_VALUE:
            return self._value(computation, operands[0], arguments)
        if instruction.opcode == "get-tuple-element":
            index = INDEX.search(instruction.attributes)
            return self._element(computation, operands[0], int(index[1]), arguments) if index else None
        if instruction.opcode in ("add", "subtract"):
            left, right = (self._value(computation, operand, arguments) for operand in operands)
            return _sum(left, right) if instruction.opcode == "add" else _difference(left, right)
        return self._result(computation, instruction, None, arguments)

    def _element(self, computation: str, name: str, index: int, arguments: list[Argument]) -> Value:
        """What is known of an element of an instruction's result, a tuple."""
        instruction = self._instruction(computation, name)
        if instruction is None:
            return None
        if instruction.opcode == "parameter":
            # Only a loop's own computations have a tuple as their parameter.
            return _Carried(index) if arguments == [None] else None
        if instruction.opcode == "tuple":
            return self._value(computation, instruction.operands[index], arguments)
        if instruction.opcode == "copy":
            return self._element(computation, instruction.operands[0], index, arguments)
        return self._result(computation, instruction, index, arguments)

    def _result(
        self, computation: str, instruction: Instruction, index: int | None, arguments: list[Argument]
    ) -> Value:
        """What is known of a fusion's or a call's result, or of an element of it."""
        root = self._root(instruction.calls[0]) if instruction.calls else None
        if root is None or instruction.opcode not in ("fusion", "call"):
            return None
        given = self._arguments(computation, instruction, arguments)
        if index is None or root.opcode != "tuple":
            return self._value(instruction.calls[0], root.name, given)
        return self._value(instruction.calls[0], root.operands[index], given)

    def _arguments(self, computation: str, caller: Instruction, arguments: list[Argument]) -> list[Argument]:
        def argument(operand: str) -> Argument:
            return lambda: self._value(computation, operand, arguments)

        return [argument(operand) for operand in caller.operands]

    def _instruction(self, computation: str, name: str) -> Instruction | None:
        if computation not in self._by_name:
            instructions = self._computations.get(computation, ())
            self._by_name[computation] = {instruction.name: instruction for instruction in instructions}
        return self._by_name[computation].get(name)

    def _root(self, computation: str) -> Instruction | None:
        return next((i for i in self._computations.get(computation, ()) if i.root), None)


def _sum(left: Value, right: Value) -> Value:
    if isinstance(left, int):
        left, right = right, left
    if not isinstance(right, int) or left is None:
        return None
    return left + right if isinstance(left, int) else _Carried(left.index, left.plus + right)


def _difference(left: Value, right: Value) -> Value:
    return _sum(left, -right) if isinstance(right, int) else None


def _iterations(first: int, step: int, direction: str, limit: int) -> int | None:
    """How often a loop runs whose counter begins at `first` and has to be `direction` of `limit`."""
    distance = limit - first
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    if direction == "NE" and step < 0:
        distance, step = -distance, -step
    return None if step <= 0 or direction == "EQ" else max(0, -(-distance // step))
