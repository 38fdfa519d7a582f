"""What a compiled step does, in its order: the reduction of a scheduled module that times are read from.

Every figure is in seconds at the full published rates of the device; `plan/timeline.py` runs the schedule at
the rates that devices reach. An operation's time is that of the tiling that libtpu chose for it, in cycles
that libtpu wrote beside it, and where it wrote none the longer one of its FLOPs and its bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from recipec.compiler.plan.hlo.collectives import MEGASCALE, Exchange, exchanges
from recipec.compiler.plan.hlo.costs import KERNEL, Products, Traffic, results_of
from recipec.compiler.plan.hlo.names import LAYER, Names
from recipec.compiler.plan.hlo.overlap import Overlap, channel
from recipec.compiler.plan.hlo.parse import Array, Instruction, Module
from recipec.compiler.plan.schedule import Exposed, Loop, Schedule, Start, Step, Transfer, Wait, Work
from recipec.compiler.plan.torus import Torus, between_slices

CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
HOST = 5
"""Memory space of the host."""
THROUGH = ("bitcast", "get-tuple-element", "opt-barrier", "async-update", "copy")
"""What may stand between the start of an asynchronous operation and its end."""


@dataclass(frozen=True)
class Rates:
    """Of one device, as published.

    Attributes:
        clock: of libtpu's cycles, Hz.
        flops: FLOP/s in bfloat16.
        hbm, host: bytes/s.
        kernel: seconds of a custom kernel from its name, operands and results.
    """

    clock: float
    flops: float
    hbm: float
    host: float
    kernel: Callable[[str, Sequence[Array], Sequence[Array]], float]


def schedule(
    module: Module, rates: Rates, axes: Mapping[str, int], torus: Torus, slices: int = 1
) -> Schedule:
    """Reduces a module.

    Args:
        axes: the mesh's sizes in order, with those of slices.
        torus: of a slice's devices in the order of the mesh.
    """
    return _Reader(module, rates, axes, torus, slices).read()


@dataclass
class _Reader:
    module: Module
    rates: Rates
    axes: Mapping[str, int]
    torus: Torus
    slices: int
    transfers: dict[Transfer, int] = field(default_factory=dict)
    channels: dict[str, int] = field(default_factory=dict)
    marks: int = 0
    uncounted: int = 0
    costed: float = 0.0
    core: float = 0.0

    def __post_init__(self) -> None:
        self.names = Names(self.module)
        self.overlap = Overlap(self.module)
        self.products = Products(self.module, passes=True)
        self.traffic = Traffic(self.module)

    def read(self) -> Schedule:
        steps = self._steps(self.module.entry, 1)
        return Schedule(
            steps, tuple(self.transfers), self.uncounted, self.costed / self.core if self.core else 1.0
        )

    def _steps(self, computation: str, times: int) -> tuple[Step, ...]:
        out: list[Step] = []
        open_marks: dict[str, list[int]] = {}
        for instruction in self.module.computations.get(computation, ()):
            for step in self._of(instruction, computation, open_marks, times):
                last = out[-1] if out else None
                if isinstance(step, Work) and isinstance(last, Work):
                    out[-1] = last + step
                else:
                    out.append(step)
        return tuple(out)

    def _of(
        self, instruction: Instruction, computation: str, open_marks: dict[str, list[int]], times: int
    ) -> Iterator[Step]:
        opcode, calls = instruction.opcode, instruction.calls
        part = self.overlap.part(instruction)
        if opcode == "while":
            body = next((name for name in calls if name in self.module.trip_counts), None)
            self.uncounted += body is None
            count = self.module.trip_counts[body] if body else 1
            inner = [step for name in calls for step in self._steps(name, times * count)]
            yield Loop(count, tuple(inner))
        elif opcode == "conditional" and calls:
            longest = max(calls, key=lambda name: len(self.module.computations.get(name, ())))
            yield from self._steps(longest, times)
        elif opcode == "call":
            for name in calls:
                yield from self._steps(name, times)
        elif opcode == "recv-done":
            yield Wait(self._received(instruction))
        elif opcode.endswith("-done") or part == "done":
            key = channel_of(self.module, instruction) if part else self._source(instruction, computation)
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
                key = channel_of(self.module, instruction) if part else instruction.name
                open_marks.setdefault(key, []).append(self.marks)
                yield Start(self._number(transfer), self.marks)
        else:
            exchange = self._exchange(instruction, computation) if not part else None
            if exchange is not None:
                yield Exposed(self._number(exchange))
            yield from self._work(instruction, computation, times, exchange is not None)

    def _received(self, instruction: Instruction) -> int:
        """The mark of what comes over a channel: a loop receives it in one turn, and waits in the next."""
        key = channel(instruction)
        if key not in self.channels:
            self.marks += 1
            self.channels[key] = self.marks
        return self.channels[key]

    def _number(self, transfer: Transfer) -> int:
        return self.transfers.setdefault(transfer, len(self.transfers))

    def _source(self, instruction: Instruction, computation: str) -> str:
        """The name of what began an operation that ends here."""
        named = self.module.by_name[computation]
        source = named.get(instruction.operands[0]) if instruction.operands else None
        while source is not None and source.opcode in THROUGH:
            source = named.get(source.operands[0])
        return source.name if source else ""

    def _exchange(self, instruction: Instruction, computation: str) -> Transfer | None:
        """The collective that an instruction is, or that its fusion or asynchronous computation holds."""
        places = [(instruction, computation)]
        if instruction.opcode == "async-start":
            places = [(i, name) for name in instruction.calls for i in self.module.computations[name]]
        for inner, name in places:
            for found in exchanges(self.module, inner, name, self.axes, self.slices):
                return self._collective(found, instruction)
        return None

    def _collective(self, found: Exchange, instruction: Instruction) -> Transfer:
        name = self._name(instruction)
        if found.over_dcn:
            seconds = between_slices(self.torus, found.bytes)
            along: tuple[str, ...] = ("dcn",)
        elif found.kind == "collective-permute":
            seconds, dimensions = self.torus.permutation(found.bytes, found.groups)
            along = tuple(map(str, dimensions))
        else:
            each = [self.torus.seconds(found.kind, found.bytes, group) for group in found.groups]
            seconds, dimensions = max(each, default=(0.0, ()))
            along = tuple(map(str, dimensions))
        return Transfer(found.kind, name, found.axes, found.over_dcn, found.bytes, seconds, along)

    def _name(self, instruction: Instruction) -> str:
        """The weight that a transfer belongs to, else the part of a layer, else the operation."""
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

    def _work(
        self, instruction: Instruction, computation: str, times: int, exchanged: bool
    ) -> Iterator[Work]:
        """What an operation takes on the core."""
        if KERNEL in instruction.attributes:
            operands = [a for n in instruction.operands for a in self._arrays(computation, n)]
            yield Work(kernels=self.rates.kernel(instruction.name, operands, instruction.arrays))
            return
        cycles = CYCLES.search(instruction.attributes)
        flops = self.products.flops(instruction, computation)
        if cycles is None and exchanged:
            return
        if cycles is not None:
            seconds = int(cycles[1]) / self.rates.clock
            self.costed += times * seconds
        else:
            moved = self.traffic.bytes(instruction, computation) / self.rates.hbm
            seconds = max(flops / self.rates.flops, moved)
        if seconds:
            self.core += times * seconds
            yield Work(products=seconds) if flops else Work(memory=seconds)

    def _arrays(self, computation: str, name: str) -> tuple[Array, ...]:
        found = self.module.by_name[computation].get(name)
        return found.arrays if found else ()


def channel_of(module: Module, instruction: Instruction) -> str:
    """The channel of the collective that a fusion is a part of."""
    for name in instruction.calls:
        for inner in module.computations.get(name, ()):
            if found := channel(inner):
                return found
    return ""
