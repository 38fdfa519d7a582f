"""The instructions that a compiled program runs, and how often."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from recipec.compiler.plan.hlo.parse import Instruction, Module


@dataclass(frozen=True)
class Executed:
    """An instruction that runs as an operation of its own.

    Attributes:
        computation: the name of the one that it stands in.
        times: how often the program runs it.
    """

    instruction: Instruction
    computation: str
    times: int


def executed(module: Module) -> Iterator[Executed]:
    """All of them: those of loops, calls and asynchronous operations, but not those within fusions. Of a
    conditional's branches the longest one is taken to run."""
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
