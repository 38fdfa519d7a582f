"""Parse the text of an optimized HLO module: its instructions, how often its loops run, what runs at all.

The TPU compiler overlaps some collectives with other operations by fusing a part of them with each. One
fusion starts the collective, others continue it while they compute something else, and a last one waits for
its end. Each of them contains the collective's instruction, with the same channel.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
        dtype: "bf16".
        dimensions: its shape.
        bytes: its size in memory, with padded tiles.
        memory_space: n of `S(n)` in the layout: 0 for HBM, 1 for VMEM, 5 for the host, ...
    """

    dtype: str
    dimensions: tuple[int, ...]
    bytes: int
    memory_space: int = 0


@dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: without the percent sign.
        opcode: "fusion", "all-gather", "custom-call", ...
        arrays: the arrays of its result; a tuple is flattened.
        shape: shape of its result, as text with layouts.
        operands: names of the instructions that it reads.
        calls: names of the computations that it calls, including bodies and conditions of loops, and the
            functions of reductions.
        attributes: the rest of the line, as text.
        op_name: op_name of its metadata, "" where it has none.
        literal: a constant's value or a parameter's number, as text.
        root: whether its result is the computation's result.
    """

    name: str
    opcode: str
    arrays: tuple[Array, ...]
    operands: tuple[str, ...]
    calls: tuple[str, ...]
    attributes: str
    op_name: str
    literal: str = ""
    root: bool = False
    shape: str = ""

    @property
    def index(self) -> int | None:
        """Which element of a tuple it returns; None where it names none."""
        match = INDEX.search(self.attributes)
        return int(match[1]) if match else None

    @property
    def channel(self) -> str:
        """Its channel id, "" where it has none."""
        match = CHANNEL.search(self.attributes)
        return match[1] if match else ""


@dataclass(frozen=True)
class Module:
    """An HLO module: its computations in the order of the text, each in the order of its schedule.

    Attributes:
        entry: name of the entry computation.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """Each computation's instructions, by name."""
        return {name: {i.name: i for i in body} for name, body in self.computations.items()}

    @functools.cached_property
    def trip_counts(self) -> dict[str, int]:
        """How often a loop's body runs, by the body's name. Loops with an unknown count are missing.

        A count is known if the compiler noted it, or if the loop counts up or down to a constant in equal
        steps. If the start or the step of a counter is not visible, it is assumed to be JAX's: from 0 by 1.
        """
        integers, counts = _Integers(self), {}
        for name, instructions in self.computations.items():
            for loop in instructions:
                if loop.opcode == "while":
                    known = KNOWN.search(loop.attributes)
                    count = int(known[1]) if known else integers.count(name, loop)
                    if count is not None:
                        counts[_called(loop, "body")] = count
        return counts

    @functools.cached_property
    def _overlapped(self) -> set[str]:
        """The channels of the collectives that overlap with other operations."""
        starts = (body for body in self.computations.values() if _holds(body, START))
        return {i.channel for body in starts for i in body if i.opcode in COLLECTIVES}

    def body(self, computation: str) -> tuple[Instruction, ...]:
        """Return a computation's instructions, () for an unknown name."""
        return self.computations.get(computation, ())

    def root(self, computation: str) -> Instruction | None:
        """Return the instruction whose result is the computation's."""
        return next((i for i in self.body(computation) if i.root), None)

    def longest(self, branches: Sequence[str]) -> str:
        """Return the branch of a conditional that is assumed to run."""
        return max(branches, key=lambda name: len(self.body(name)))

    def part(self, instruction: Instruction) -> str:
        """Return "start", "step" or "done" for a part of an overlapped collective; "" for others."""
        if not self._overlapped or instruction.opcode != "fusion" or not instruction.calls:
            return ""
        body = self.body(instruction.calls[0])
        if not any(i.channel in self._overlapped for i in body if i.opcode in COLLECTIVES):
            return ""
        return "start" if _holds(body, START) else "done" if _holds(body, DONE) else "step"


HEADER = re.compile(r"(ENTRY\s+)?%?([^\s(]+)\s*\(.*->.*\{$")
HEAD = re.compile(r"\s+(ROOT\s+)?%?([^\s=(]+) = ")
OPCODE = re.compile(r"(?:^| )([a-z][a-z0-9-]*)\(")
REFERENCE = re.compile(r"%([^\s,(){}]+)")
CALLS = re.compile(
    r"\b(?:calls|to_apply|body|condition|branch_computations|true_computation|false_computation"
    r"|called_computations|comparator|select|scatter)=(\{[^}]*\}|%[^\s,]+)"
)
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
TILES = re.compile(r"T((?:\([\d,*]+\))+)")
SPACE = re.compile(r"S\((\d+)\)")
ELEMENT_BITS = re.compile(r"E\((\d+)\)")
BITS = re.compile(r"[a-z]+(\d+)")


def parse(text: str) -> Module:
    """Parse an HLO module's text, as `jax.stages.Compiled.as_text()` gives it for a TPU.

    Raises:
        ValueError: the text is no HLO module.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = ""
    for header, lines in _blocks(text):
        match = HEADER.match(header)
        assert match is not None
        name = match[2]
        computations[name] = tuple(_with_elements([_instruction(line) for line in lines]))
        if match[1]:
            entry = name
    if not entry:
        raise ValueError("The text has no entry computation; it is no HLO module.")
    return Module(computations, entry)


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each computation's header and instructions. An attribute may span several lines of the text."""
    header: str | None = None
    body: list[str] = []
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if header is None:
            if line.endswith("{") and HEADER.match(line):
                header, body = line, []
        elif HEAD.match(line):
            body.append(line)
        elif _closes(line) and not (lines[number + 1 : number + 2] or [""])[0].strip():
            yield header, body
            header = None
        elif body:
            body[-1] += "\n" + line


def _closes(line: str) -> bool:
    """Return whether a line ends a computation, if the next line is empty."""
    return line == "}" or line.startswith("}, execution_thread=")


def _instruction(line: str) -> Instruction:
    head = HEAD.match(line)
    assert head is not None
    rest = line[head.end() :]
    opcode = OPCODE.search(rest)
    if opcode is None:
        raise ValueError(f"The HLO module has an instruction without an operation: {line.strip()[:200]}")
    operands, attributes = _parenthesis(rest, opcode.end())
    literal = operands if opcode[1] in ("constant", "parameter") else ""
    calls = [name for group in CALLS.findall(attributes) for name in REFERENCE.findall(group)]
    op_name = OP_NAME.search(attributes)
    return Instruction(
        name=head[2],
        opcode=opcode[1],
        arrays=_arrays(rest[: opcode.start()]),
        operands=() if literal else tuple(REFERENCE.findall(operands)),
        calls=tuple(calls),
        attributes=attributes.removeprefix(", "),
        op_name=op_name[1] if op_name else "",
        literal=literal,
        root=head[1] is not None,
        shape=rest[: opcode.start()],
    )


def _with_elements(body: Sequence[Instruction]) -> Iterator[Instruction]:
    """Yield instructions, and each element of a tuple that is only referred to: newer texts write `%x#1`."""
    named = {instruction.name: instruction for instruction in body}
    yielded: set[str] = set()
    for instruction in body:
        for operand in instruction.operands:
            name, _, index = operand.partition("#")
            if index and operand not in yielded:
                yielded.add(operand)
                yield _element(named[name], int(index), operand)
        yield instruction


def _element(source: Instruction, index: int, name: str) -> Instruction:
    shape = _parts(source.shape)[index]
    return Instruction(
        name=name,
        opcode="get-tuple-element",
        arrays=_arrays(shape),
        operands=(source.name,),
        calls=(),
        attributes=f"index={index}",
        op_name=source.op_name,
        shape=shape,
    )


@functools.lru_cache(maxsize=4096)
def _parts(shape: str) -> list[str]:
    """Return the shapes of a tuple's elements."""
    return split(shape.strip().removeprefix("(").removesuffix(")"), ",", "([{", ")]}")


def split(text: str, separator: str, opening: str, closing: str) -> list[str]:
    """Split a text where it has the separator outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in opening) - (character in closing)
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _parenthesis(text: str, start: int) -> tuple[str, str]:
    """Return the text inside the parenthesis that opens before `start`, and the text after it."""
    end = text.find(")", start)
    while end >= 0 and text.count("(", start, end) != text.count(")", start, end):
        end = text.find(")", end + 1)
    return (text[start:end], text[end + 1 :]) if end >= 0 else (text[start:], "")


def bytes_of(arrays: Sequence[Array]) -> int:
    """Return the bytes of arrays together."""
    return sum(array.bytes for array in arrays)


@functools.lru_cache(maxsize=4096)
def _arrays(shape: str) -> tuple[Array, ...]:
    return tuple(_array(*match) for match in ARRAY.findall(shape) if match[0] not in ("token", "opaque"))


def _array(dtype: str, dimensions: str, layout: str) -> Array:
    sizes = tuple(int(size.removeprefix("<=")) for size in dimensions.split(",") if size)
    order, _, rest = layout.partition(":")
    minor_to_major = [int(number) for number in order.split(",") if number]
    physical = [sizes[number] for number in reversed(minor_to_major)] if minor_to_major else list(sizes)
    tiles = TILES.search(rest)
    elements = _padded(physical, tiles[1] if tiles else "")
    space = SPACE.search(rest)
    return Array(dtype, sizes, -(-elements * _bits(dtype, rest) // 8), int(space[1]) if space else 0)


def _padded(physical: list[int], tiles: str) -> int:
    """Return the elements that an array takes in memory, with every tile full.

    The first tile spans the minor dimensions; the second tile spans the dimensions of the first.

    Args:
        physical: dimensions from the major to the minor one.
        tiles: "(8,128)(2,1)", "" for none.
    """
    for tile in re.findall(r"\(([^)]*)\)", tiles):
        # A star joins a dimension to the next one, so that it has no padding.
        sizes = [1 if size == "*" else int(size) for size in tile.split(",")]
        physical = [1] * (len(sizes) - len(physical)) + physical
        minor = physical[-len(sizes) :]
        counts = [-(-dimension // size) for dimension, size in zip(minor, sizes, strict=True)]
        physical = physical[: -len(sizes)] + counts + sizes
    return math.prod(physical)


def _bits(dtype: str, layout: str) -> int:
    """Return the bits of an element. Types below a byte take a byte unless the layout packs them."""
    packed = ELEMENT_BITS.search(layout)
    if packed:
        return int(packed[1])
    bits = BITS.match(dtype)
    return max(8, int(bits[1])) if bits else 8


KNOWN = re.compile(r'known_trip_count"?\s*[:=]\s*\{\s*"?n"?\s*[:=]\s*"?(\d+)')
DIRECTION = re.compile(r"\bdirection=(\w\w)")
INDEX = re.compile(r"\bindex=(\d+)")
INTEGER = re.compile(r"-?\d+$")
SAME_VALUE = ("copy", "copy-start", "copy-done", "bitcast", "convert", "reshape")
MIRRORED = {"LT": "GT", "LE": "GE", "GT": "LT", "GE": "LE", "NE": "NE", "EQ": "EQ"}


@dataclass(frozen=True)
class _Carried:
    """An element of the tuple that a loop carries, at the start of the iteration, plus a constant."""

    index: int
    plus: int = 0


Value = int | _Carried | None
"""What is known about an integer: its value, its relation to what the loop carries, or nothing (None)."""
Argument = Callable[[], Value] | None
"""A parameter of a computation, evaluated lazily; None for the tuple that a loop carries."""


def _called(instruction: Instruction, attribute: str) -> str:
    match = re.search(rf"\b{attribute}=%([^\s,}}]+)", instruction.attributes)
    return match[1] if match else ""


class _Integers:
    """The values of a module's integers, as far as they can be traced."""

    def __init__(self, module: Module) -> None:
        self._module = module

    def count(self, caller: str, loop: Instruction) -> int | None:
        """Return how often a loop runs, or None where the text does not show it."""
        compared = self._comparison(_called(loop, "condition"))
        if compared is None:
            return None
        counter, direction, end = compared

        def initial(index: int) -> Value:
            return self._element(caller, loop.operands[0], index, [])

        limit = end if isinstance(end, int) else initial(end.index)
        first = initial(counter.index)
        body = _called(loop, "body")
        root = self._module.root(body)
        after = self._element(body, root.name, counter.index, [None]) if root else None
        step = after.plus if isinstance(after, _Carried) and after.index == counter.index else 1
        if not isinstance(limit, int):
            return None
        return _iterations(first if isinstance(first, int) else 0, step, direction, limit - counter.plus)

    def _comparison(self, condition: str) -> tuple[_Carried, str, int | _Carried] | None:
        """Return the counter, the direction and the other side of the comparison that ends a loop."""
        name, arguments = condition, list[Argument]([None])
        root = self._module.root(name)
        while root is not None and root.opcode in ("fusion", "call") and root.calls:
            arguments = self._arguments(name, root, arguments)
            name = root.calls[0]
            root = self._module.root(name)
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
        """Return what is known about an instruction's result."""
        instruction = self._module.by_name[computation].get(name)
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
            index = instruction.index
            return None if index is None else self._element(computation, operands[0], index, arguments)
        if instruction.opcode in ("add", "subtract"):
            left, right = (self._value(computation, operand, arguments) for operand in operands)
            return _sum(left, right) if instruction.opcode == "add" else _difference(left, right)
        return self._result(computation, instruction, None, arguments)

    def _element(self, computation: str, name: str, index: int, arguments: list[Argument]) -> Value:
        """Return what is known about an element of an instruction's result, which is a tuple."""
        instruction = self._module.by_name[computation].get(name)
        if instruction is None:
            return None
        if instruction.opcode == "parameter":
            # Only a loop's own computations have a tuple as parameter.
            return _Carried(index) if arguments == [None] else None
        if instruction.opcode == "tuple":
            return self._value(computation, instruction.operands[index], arguments)
        if instruction.opcode == "copy":
            return self._element(computation, instruction.operands[0], index, arguments)
        return self._result(computation, instruction, index, arguments)

    def _result(
        self, computation: str, instruction: Instruction, index: int | None, arguments: list[Argument]
    ) -> Value:
        """Return what is known about the result of a fusion or a call, or about an element of it."""
        root = self._module.root(instruction.calls[0]) if instruction.calls else None
        if root is None or instruction.opcode not in ("fusion", "call"):
            return None
        values = self._arguments(computation, instruction, arguments)
        if index is None or root.opcode != "tuple":
            return self._value(instruction.calls[0], root.name, values)
        return self._value(instruction.calls[0], root.operands[index], values)

    def _arguments(self, computation: str, caller: Instruction, arguments: list[Argument]) -> list[Argument]:
        def argument(operand: str) -> Argument:
            return lambda: self._value(computation, operand, arguments)

        return [argument(operand) for operand in caller.operands]


def _sum(left: Value, right: Value) -> Value:
    if isinstance(left, int):
        left, right = right, left
    if not isinstance(right, int) or left is None:
        return None
    return left + right if isinstance(left, int) else _Carried(left.index, left.plus + right)


def _difference(left: Value, right: Value) -> Value:
    return _sum(left, -right) if isinstance(right, int) else None


def _iterations(first: int, step: int, direction: str, limit: int) -> int | None:
    """Return how often a loop runs while its counter, which starts at `first`, is `direction` of `limit`."""
    distance = limit - first
    if direction in ("GT", "GE"):
        distance, step = -distance, -step
    if direction in ("LE", "GE"):
        distance += 1
    if direction == "NE" and step < 0:
        distance, step = -distance, -step
    return None if step <= 0 or direction == "EQ" else max(0, -(-distance // step))


def executed(module: Module, even: bool = False) -> Iterator[tuple[Instruction, str, float]]:
    """Yield all instructions that run, including those in loops, calls and asynchronous operations.

    Each comes with the name of its computation, and with how often the program runs it. Instructions within
    fusions are left out.

    Args:
        even: whether the branches of a conditional run equally often. Otherwise the longest one always runs.
    """
    yield from _executed(module, module.entry, 1, even)


def _executed(
    module: Module, computation: str, times: float, even: bool
) -> Iterator[tuple[Instruction, str, float]]:
    for instruction in module.body(computation):
        yield instruction, computation, times
        calls = instruction.calls
        if instruction.opcode == "while":
            for name in calls:
                yield from _executed(module, name, times * module.trip_counts.get(name, 1), even)
        elif instruction.opcode in ("call", "call-start", "async-start"):
            for name in calls:
                yield from _executed(module, name, times, even)
        elif instruction.opcode == "conditional" and calls:
            branches = calls if even else (module.longest(calls),)
            for name in branches:
                yield from _executed(module, name, times / len(branches), even)


COLLECTIVES = frozenset(
    (
        "all-gather",
        "all-reduce",
        "reduce-scatter",
        "all-to-all",
        "ragged-all-to-all",
        "collective-permute",
        "collective-broadcast",
    )
)
START = 'custom_call_target="AsyncCollectiveStart"'
DONE = 'custom_call_target="AsyncCollectiveDone"'
CHANNEL = re.compile(r"\bchannel_id=(\d+)")
ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{")
"""A result, and the operand whose memory it reuses, in output_to_operand_aliasing."""


def kept(instruction: Instruction) -> tuple[set[int], set[int]]:
    """Return the numbers of the operands, and of the results, that share memory with each other."""
    pairs = ALIAS.findall(instruction.attributes)
    return {int(operand) for _, operand in pairs}, {int(result or 0) for result, _ in pairs}


def _holds(body: tuple[Instruction, ...], target: str) -> bool:
    return any(i.opcode == "custom-call" and target in i.attributes for i in body)
