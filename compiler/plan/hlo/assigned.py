"""Read the files that XLA dumps during a compile: the scheduled module, and its allocations in HBM.

libtpu writes both before it generates code. It compares the sum of the allocations with a device's HBM.
(`jax.stages.Compiled.memory_analysis` counts gaps between temporaries twice.)
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from recipec.compiler.plan.hlo.parse import INDEX, OP_NAME, Instruction, Module

BEFORE = "*.before_optimizations.txt"
"""The module as traced."""
MODULE = "*.after_optimizations.txt"
ASSIGNED = "*.after_optimizations-buffer-assignment.txt"
NEXT = "*.after_optimizations-live-range.txt"
"""The pinned libtpu writes it after the other two files; newer ones write all of them at once."""
ALLOCATION = re.compile(r"^allocation \d+: size (\d+), (.*)$", re.MULTILINE)
ELSEWHERE = re.compile(r"\bcolor \d+\b")
"""Marks an allocation in another memory than HBM."""
INSTRUCTION = re.compile(r"^ +(?:ROOT )?%\S+ = ", re.MULTILINE)
PARAMETER = re.compile(r" parameter\((\d+)\)")


@dataclass(frozen=True)
class Assigned:
    """Bytes of HBM that a program takes, without its code.

    Attributes:
        arguments: arguments, padding included.
        temporaries: all arrays that live only within a step, and the gaps between them.
        rest: constants, and outputs that reuse no donated argument.
        instructions: number of the module's instructions, including those in fusions.
    """

    arguments: float
    temporaries: float
    rest: float
    instructions: int = 0


def sizes(folder: Path) -> tuple[int, ...] | None:
    """Return the sizes of the files that `scheduled` needs, in bytes, or None until all of them have some.

    The files are complete when two calls, some time apart, return the same.
    """
    found = [next(folder.glob(name), None) for name in (MODULE, ASSIGNED, NEXT)]
    written = tuple(path.stat().st_size for path in found if path is not None)
    return written if len(written) == len(found) and all(written) else None


def scheduled(folder: Path) -> tuple[str, Assigned]:
    """Return the module's text and its memory, from files that are complete."""
    module, assigned = (_dump(folder, name) for name in (MODULE, ASSIGNED))
    return module, replace(assignment(assigned), instructions=len(INSTRUCTION.findall(module)))


def assignment(text: str) -> Assigned:
    """Read XLA's list of allocations."""
    arguments = temporaries = rest = 0
    for size, about in ALLOCATION.findall(text):
        if ELSEWHERE.search(about):
            continue
        if about.startswith("parameter"):
            arguments += int(size)
        elif "preallocated-temp" in about:
            temporaries += int(size)
        else:
            rest += int(size)
    return Assigned(float(arguments), float(temporaries), float(rest))


def untupled(module: Module, folder: Path) -> Module:
    """Return a module in which every argument is a parameter with the name that it was traced with.

    JAX passes more than 2,000 arguments as one tuple, whose elements have no names.
    """
    entry = module.computations[module.entry]
    tuples = [i for i in entry if i.opcode == "parameter"]
    if len(tuples) != 1 or not tuples[0].shape.startswith("("):
        return module
    names: dict[str, str] = {}
    for line in _dump(folder, BEFORE).partition("\nENTRY ")[2].splitlines():
        number, name = PARAMETER.search(line), OP_NAME.search(line)
        if number and name:
            names[number[1]] = name[1]

    def of(instruction: Instruction) -> Instruction:
        index = INDEX.search(instruction.attributes)
        if index is None or instruction.operands != (tuples[0].name,):
            return instruction
        return replace(
            instruction, opcode="parameter", operands=(), literal=index[1], op_name=names.get(index[1], "")
        )

    found = {**module.computations, module.entry: tuple(map(of, entry))}
    return replace(module, computations=found)


def _dump(folder: Path, pattern: str) -> str:
    """Read the file that XLA dumped under a name of this pattern."""
    found = next(folder.glob(pattern), None)
    if found is None:
        raise FileNotFoundError(f"libtpu wrote no {pattern}: install the libtpu that recipec pins")
    return found.read_text(encoding="utf-8")
