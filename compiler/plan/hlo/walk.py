"""List the instructions that a compiled program runs, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipec.compiler.plan.hlo.parse import Instruction, Module


@dataclass(frozen=True)
class Executed:
    """An instruction that runs as an operation of its own.

    Attributes:
        computation: the name of the computation that contains it.
        times: how often the program runs it.
    """

    instruction: Instruction
    computation: str
    times: int


def executed(module: Module) -> Iterator[Executed]:
    """Yield all instructions that run, including those in loops, calls and asynchronous operations.

    Instructions within fusions are left out. Of a conditional, the longest branch is assumed to run.
    """
    yield from _executed(module, module.entry, 1)


def _executed(module: Module, computation: str, times: int) -> Iterator[Executed]:
    for instruction in module.computations.get(computation, ()):
        yield Executed(instruction, computation, times)
        calls = instruction.calls
        if instruction.opcode == "while":
            for name in calls:
                yield from _executed(module, name, times * module.trip_counts.get(name, 1))
        elif instruction.opcode in ("call", "call-start", "async-start"):
            for name in calls:
                yield from _executed(module, name, times)
        elif instruction.opcode == "conditional" and calls:
            longest = max(calls, key=lambda name: len(module.computations.get(name, ())))
            yield from _executed(module, longest, times)
