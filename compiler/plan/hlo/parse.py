"""The text of an optimised HLO module as instructions."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from compiler.plan.hlo.loops import trip_counts


@dataclass(frozen=True)
class Array:
    """One array of an instruction's result.

    Attributes:
        dtype: "bf16".
        dimensions: its shape.
        bytes: as it lies in memory: tiles are padded.
        memory_space: 0 for HBM, others as `S(n)` in the layout says (1 VMEM, 5 host, ...).
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
        arrays: of its result; a tuple's, flattened.
        operands: names of the instructions that it reads.
        calls: names of the computations that it calls, bodies and conditions of loops included, and the
            functions of reductions.
        attributes: the rest of the line, as text.
        op_name: of its metadata, "" where it has none.
        literal: of a constant its value, of a parameter its number, as text.
        root: whether its result is the computation's.
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


@dataclass(frozen=True)
class Module:
    """An HLO module: its computations in the order of the text, each in the order of its schedule.

    Attributes:
        entry: name of the entry computation.
        trip_counts: how often a loop's body runs, by the body's name. A loop whose count the text does not
            tell is missing.
    """

    computations: dict[str, tuple[Instruction, ...]]
    entry: str
    trip_counts: dict[str, int]

    @functools.cached_property
    def by_name(self) -> dict[str, dict[str, Instruction]]:
        """Each computation's instructions by their names."""
        return {name: {i.name: i for i in body} for name, body in self.computations.items()}

    @property
    def unknown_loops(self) -> tuple[str, ...]:
        """Loops that are missing in trip_counts, by their instructions' names."""
        loops = (i for body in self.computations.values() for i in body if i.opcode == "while")
        return tuple(loop.name for loop in loops if not any(name in self.trip_counts for name in loop.calls))


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
    """Reads an HLO module as `jax.stages.Compiled.as_text()` gives it for a TPU.

    Raises:
        ValueError: the text is no HLO module.
    """
    computations: dict[str, tuple[Instruction, ...]] = {}
    entry = ""
    for header, lines in _blocks(text):
        match = HEADER.match(header)
        assert match is not None
        name = match[2]
        computations[name] = tuple(_instruction(line) for line in lines)
        if match[1]:
            entry = name
    if not entry:
        raise ValueError("The text has no entry computation; it is no HLO module.")
    return Module(computations, entry, trip_counts(computations))


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each computation's header and instructions. An attribute may run over several lines of the text."""
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
    """Whether a line ends a computation, when the next one is empty."""
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
    )


def _parenthesis(text: str, start: int) -> tuple[str, str]:
    """What stands between the parenthesis opened before `start` and its end, and what follows."""
    end = text.find(")", start)
    while end >= 0 and text.count("(", start, end) != text.count(")", start, end):
        end = text.find(")", end + 1)
    return (text[start:end], text[end + 1 :]) if end >= 0 else (text[start:], "")


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
    """Elements that an array takes, each of its tiles rounded up.

    A tile spans the minor dimensions, a second one those of the first tile.

    Args:
        physical: dimensions from the major to the minor one.
        tiles: "(8,128)(2,1)", "" for none.
    """
    for tile in re.findall(r"\(([^)]*)\)", tiles):
        # A star joins a dimension to the next one: nothing is padded in it.
        sizes = [1 if size == "*" else int(size) for size in tile.split(",")]
        physical = [1] * (len(sizes) - len(physical)) + physical
        minor = physical[-len(sizes) :]
        counts = [-(-dimension // size) for dimension, size in zip(minor, sizes, strict=True)]
        physical = physical[: -len(sizes)] + counts + sizes
    return math.prod(physical)


def _bits(dtype: str, layout: str) -> int:
    """Of an element. Types below a byte take a byte where the layout does not pack them."""
    packed = ELEMENT_BITS.search(layout)
    if packed:
        return int(packed[1])
    bits = BITS.match(dtype)
    return max(8, int(bits[1])) if bits else 8
