"""Reduce a scheduled HLO module to a `Schedule`: what the step does, in order.

Every figure is in seconds at the full published rates of the device; `plan/timeline.py` runs the schedule at
the rates that devices reach. The schedule has no times of operations. Those are the `Prices` of a module that
was compiled to the end, in which libtpu notes each operation's cycles.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from recipec.compiler.plan.hlo.costs import (
    IN_PARTS,
    KERNEL,
    LABELS,
    MEGASCALE,
    NO_ARRAYS,
    NO_DATA,
    NO_WORK,
    WINDOW,
    Exchange,
    Products,
    Traffic,
    exchanges,
    results_of,
)
from recipec.compiler.plan.hlo.liveness import LAYER, Names
from recipec.compiler.plan.hlo.parse import Array, Instruction, Module
from recipec.compiler.plan.schedule import (
    Exposed,
    Loop,
    Operation,
    Prices,
    Schedule,
    Start,
    Step,
    Transfer,
    Wait,
    Work,
    prices,
)
from recipec.compiler.plan.torus import Torus, between_slices

CYCLES = re.compile(r'"estimated_cycles":"(\d{1,18})"')
"""The cycles of an operation. libtpu writes the largest int64, of 19 digits, where it has no estimate."""
HOST = 5
"""Memory space of the host."""
DATA_MOVEMENT = {
    *("broadcast", "concatenate", "convert", "copy", "dynamic-slice", "dynamic-update-slice"),
    *("pad", "reduce", "slice", "transpose"),
}
"""Operations that, outside of a fusion, only move or reduce arrays."""
MOST_OF_BYTES = 2.0
"""The most that such an operation takes, relative to its bytes at the full rate. libtpu's cycles for them are
up to 17 times as many, which published steps contradict (docs/planning.md). Fused ones take about 2."""
THROUGH = ("bitcast", "get-tuple-element", "opt-barrier", "async-update", "copy")
"""Operations that may be between the start of an asynchronous operation and its end."""


@dataclass(frozen=True)
class Rates:
    """The published rates of one device.

    Attributes:
        clock: clock of libtpu's cycles, Hz.
        flops: FLOP/s in bfloat16.
        hbm, host: bytes/s of the device's memory, and of transfers to the host.
        kernel: returns the seconds of a custom kernel from its name, operands and results.
    """

    clock: float
    flops: float
    hbm: float
    host: float
    kernel: Callable[[str, Sequence[Array], Sequence[Array]], float]


def schedule(
    module: Module,
    rates: Rates,
    axes: Mapping[str, int],
    torus: Torus,
    slices: int = 1,
    even: bool = False,
) -> tuple[Schedule, Prices]:
    """Reduce a module to its schedule, and to the prices of its operations, where the text has cycles.

    Args:
        axes: the sizes of the mesh's axes in order, including the axis of slices.
        torus: the devices of a slice, in the order of the mesh.
        even: whether the branches of a conditional run equally often, so that their mean counts. Otherwise
            the longest one counts.
    """
    return _ScheduleReader(module, rates, axes, torus, slices, even).read()


@dataclass
class _ScheduleReader:
    module: Module
    rates: Rates
    axes: Mapping[str, int]
    torus: Torus
    slices: int
    even: bool = False
    transfers: dict[Transfer, int] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    marks: int = 0
    uncounted: int = 0
    operations: dict[tuple[Operation, str], int] = field(default_factory=dict)
    cycles: dict[Operation, float | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.fingerprints = Fingerprints(self.module)
        self.names = Names(self.module)
        self.products = Products(self.module, passes=True)
        self.traffic = Traffic(self.module)

    def read(self) -> tuple[Schedule, Prices]:
        steps = self._steps(self.module.entry)
        operations, names = zip(*self.operations, strict=True) if self.operations else ((), ())
        schedule = Schedule(steps, tuple(self.transfers), operations, names, uncounted_loops=self.uncounted)
        return schedule, prices(self.cycles.items())

    def _steps(self, computation: str) -> tuple[Step, ...]:
        out: list[Step] = []
        open_marks: dict[str, list[int]] = {}
        for instruction in self.module.body(computation):
            for step in self._of(instruction, computation, open_marks):
                last = out[-1] if out else None
                if isinstance(step, Work) and isinstance(last, Work):
                    out[-1] = last + step
                else:
                    out.append(step)
        return tuple(out)

    def _of(
        self, instruction: Instruction, computation: str, open_marks: dict[str, list[int]]
    ) -> Iterator[Step]:
        opcode, calls = instruction.opcode, instruction.calls
        part = self.module.part(instruction)
        if opcode == "while":
            body = next((name for name in calls if name in self.module.trip_counts), None)
            self.uncounted += body is None
            count = self.module.trip_counts[body] if body else 1
            inner = [step for name in calls for step in self._steps(name)]
            yield Loop(count, tuple(inner), body is not None)
        elif opcode == "conditional" and calls and self.even:
            yield from self._mean([self._steps(name) for name in calls])
        elif opcode == "conditional" and calls:
            yield from self._steps(self.module.longest(calls))
        elif opcode == "call":
            for name in calls:
                yield from self._steps(name)
        elif opcode == "recv-done":
            yield Wait(self._received(instruction))
        elif opcode.endswith("-done") or part == "done":
            key = self._channel(instruction) if part else self._source(instruction, computation)
            marks = open_marks.get(key)
            if marks:
                yield Wait(marks.pop(0))
        elif opcode.endswith("-update"):
            return
        elif opcode.endswith("-start") or part == "start" or opcode in ("recv", "send"):
            transfer = self._transfer(instruction, computation)
            if transfer is not None and opcode == "recv":
                yield Start(self._number(transfer), self._received(instruction))
            elif transfer is not None:
                self.marks += 1
                key = self._channel(instruction) if part else instruction.name
                open_marks.setdefault(key, []).append(self.marks)
                yield Start(self._number(transfer), self.marks)
        else:
            exchange = self._exchange(instruction, computation) if not part else None
            if exchange is not None:
                yield Exposed(self._number(exchange))
            yield from self._work(instruction, computation, exchange is not None)

    def _mean(self, branches: Sequence[tuple[Step, ...]]) -> Iterator[Step]:
        """Yield the mean work of branches, and the transfers of the last one."""
        share = 1 / len(branches)
        for step in (step for branch in branches for step in branch if isinstance(step, Work)):
            operations = tuple((number, count * share) for number, count in step.operations)
            yield replace(step * share, operations=operations)
        yield from (step for step in branches[-1] if not isinstance(step, Work))

    def _channel(self, fusion: Instruction) -> str:
        """Return the channel of the collective that a fusion is a part of."""
        inner = (i for name in fusion.calls for i in self.module.body(name))
        return next((i.channel for i in inner if i.channel), "")

    def _received(self, instruction: Instruction) -> int:
        """Return the mark of a channel's transfer. A loop may start it in one turn and wait in the next."""
        key = instruction.channel
        if key not in self.channels:
            self.marks += 1
            self.channels[key] = self.marks
        return self.channels[key]

    def _number(self, transfer: Transfer) -> int:
        return self.transfers.setdefault(transfer, len(self.transfers))

    def _source(self, instruction: Instruction, computation: str) -> str:
        """Return the name of the instruction that started the operation that ends here."""
        named = self.module.by_name[computation]
        source = named.get(instruction.operands[0]) if instruction.operands else None
        while source is not None and source.opcode in THROUGH:
            source = named.get(source.operands[0])
        return source.name if source else ""

    def _exchange(self, instruction: Instruction, computation: str) -> Transfer | None:
        """Return the collective that an instruction is, or that its fusion or async computation contains."""
        places = [(instruction, computation)]
        if instruction.opcode == "async-start":
            places = [(i, name) for name in instruction.calls for i in self.module.computations[name]]
        for inner, name in places:
            for exchange in exchanges(self.module, inner, name, self.axes, self.slices):
                return self._collective(exchange, instruction)
        return None

    def _collective(self, exchange: Exchange, instruction: Instruction) -> Transfer:
        name = self._name(instruction)
        if exchange.over_dcn:
            seconds = between_slices(self.torus, exchange.bytes)
            along: tuple[str, ...] = ("dcn",)
        elif exchange.kind == "collective-permute":
            seconds, dimensions = self.torus.permutation(exchange.bytes, exchange.groups)
            along = tuple(map(str, dimensions))
        else:
            costs = [self.torus.seconds(exchange.kind, exchange.bytes, group) for group in exchange.groups]
            seconds, dimensions = max(costs, default=(0.0, ()))
            along = tuple(map(str, dimensions))
        return Transfer(exchange.kind, name, exchange.axes, exchange.over_dcn, exchange.bytes, seconds, along)

    def _name(self, instruction: Instruction) -> str:
        """Return the weight that a transfer belongs to, else the part of a layer, else the operation."""
        where, _, what = self.names.of(instruction).partition(" / ")
        return f"{where} / {what.partition(' / ')[0]}" if where == LAYER else where

    def _transfer(self, instruction: Instruction, computation: str) -> Transfer | None:
        if instruction.opcode == "send" or (
            instruction.opcode == "recv" and MEGASCALE not in instruction.attributes
        ):
            return None
        if exchange := self._exchange(instruction, computation):
            return exchange
        operands = [a for n in instruction.operands for a in self._arrays(computation, n)]
        moved = results_of(instruction, len(instruction.operands))
        if instruction.opcode == "dynamic-update-slice-start":
            moved = self._arrays(computation, instruction.operands[1])
        spaces = {array.memory_space for array in (*moved, *operands)}
        size = float(sum(array.bytes for array in moved))
        kind, rate = ("host", self.rates.host) if HOST in spaces else ("copy", self.rates.hbm)
        name = self._name(instruction)
        return Transfer(kind, name, (), False, size, size / rate, ("host" if kind == "host" else "hbm",))

    def _work(self, instruction: Instruction, computation: str, exchanged: bool) -> Iterator[Work]:
        """Yield the core's work for an operation."""
        if KERNEL in instruction.attributes:
            operands = [a for n in instruction.operands for a in self._arrays(computation, n)]
            yield Work(kernels=self.rates.kernel(instruction.name, operands, instruction.arrays))
            return
        if instruction.opcode in NO_DATA | NO_ARRAYS | IN_PARTS or NO_WORK.search(instruction.attributes):
            return
        flops = self.products.flops(instruction, computation)
        moved = self.traffic.bytes(instruction, computation)
        # A collective counts only with its own cycles here, because what it moves is a transfer.
        seconds = 0.0 if exchanged else max(flops / self.rates.flops, moved / self.rates.hbm)
        key, alike, products = self.fingerprints.of(instruction, computation)
        operation = Operation(key, alike, products if flops else "", seconds)
        self.cycles.setdefault(operation, self._by_cycles(instruction, operation))
        named = operation, self.names.of(instruction)
        yield Work(operations=((self.operations.setdefault(named, len(self.operations)), 1),))

    def _by_cycles(self, instruction: Instruction, operation: Operation) -> float | None:
        """Return an operation's seconds by libtpu's cycles, or None if it has none."""
        cycles = CYCLES.search(instruction.attributes)
        seconds = int(cycles[1]) / self.rates.clock if cycles else None
        if seconds is None or instruction.opcode not in DATA_MOVEMENT or not operation.seconds:
            return seconds
        return min(seconds, MOST_OF_BYTES * operation.seconds)

    def _arrays(self, computation: str, name: str) -> tuple[Array, ...]:
        arrays = self.module.by_name[computation].get(name)
        return arrays.arrays if arrays else ()


NOTES = re.compile(r",? ?(?:metadata|backend_config)=.*", re.DOTALL)
"""The end of an instruction's attributes, on which its work does not depend."""
NAMES = re.compile(r"%[^\s,(){}]+|\bchannel_id=\d+|/\*index=\d+\*/")
MEMORY = re.compile(r"S\(\d+\)")
PRODUCTS = ("convolution", "dot")


@dataclass
class Fingerprints:
    """The fingerprints of a module's operations."""

    module: Module
    _bodies: dict[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)

    def of(self, instruction: Instruction, computation: str) -> tuple[str, str, str]:
        """Return three digests of an operation.

        The first is of its computation with shapes, layouts and memories. The second leaves out the memories.
        The third is of its matrix products alone, "" without any.
        """
        named = self.module.by_name[computation]
        operands = [named[name].shape for name in instruction.operands if name in named]
        text = self._line(instruction, operands)
        products = self._products(instruction, computation)
        alike = " ".join(MEMORY.sub("", text).split())
        return _digest(text), _digest(alike), _digest("\n".join(products)) if products else ""

    def _line(self, instruction: Instruction, operands: Sequence[str]) -> str:
        attributes = NAMES.sub("", NOTES.sub("", instruction.attributes))
        literal = instruction.literal if instruction.opcode == "parameter" else ""
        bodies = [self._body(name)[0] for name in instruction.calls if name in self.module.computations]
        shapes = NAMES.sub("", ";".join((instruction.shape, *operands)))
        return f"{shapes} {instruction.opcode} {literal} {attributes} {' '.join(bodies)}"

    def _body(self, computation: str) -> tuple[str, tuple[str, ...]]:
        """Return a computation's text without names, and its matrix products."""
        if computation not in self._bodies:
            instructions = self.module.computations[computation]
            numbers = {instruction.name: str(number) for number, instruction in enumerate(instructions)}
            lines = [self._line(i, [numbers.get(name, "") for name in i.operands]) for i in instructions]
            products = sorted(product for i in instructions for product in self._products(i, computation))
            text = "\n".join(lines)
            memories = " ".join(MEMORY.findall(text))  # separate, because `of` removes them
            self._bodies[computation] = f"{_digest(MEMORY.sub('', text))} {memories}", tuple(products)
        return self._bodies[computation]

    def _products(self, instruction: Instruction, computation: str) -> tuple[str, ...]:
        if instruction.opcode == "fusion":
            return tuple(product for name in instruction.calls for product in self._body(name)[1])
        if instruction.opcode not in PRODUCTS:
            return ()
        named = self.module.by_name[computation]
        arrays = [instruction.arrays[0], *(named[name].arrays[0] for name in instruction.operands[:2])]
        shapes = " ".join(f"{array.dtype}{array.dimensions}" for array in arrays)
        labels, window = LABELS.search(instruction.attributes), WINDOW.search(instruction.attributes)
        return (f"{shapes} {labels and labels[0]} {window and window[0]}",)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
