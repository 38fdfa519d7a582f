"""Read what XLA dumps during a compile: the scheduled module, its allocations in HBM, or why it does not fit.

libtpu writes both before it generates code. It compares the sum of the allocations with a device's HBM.
(`jax.stages.Compiled.memory_analysis` counts gaps between temporaries twice.)

Usually libtpu refuses a program once it has counted the arrays, and gives only their sum: arguments, results
and temporaries together. The arrays are then in the dumped text. Another form of the message lists the
largest arrays. A kernel can also exhaust VMEM, a different memory, with a message of its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from recipec.compiler.plan.hlo.liveness import largest, operation, weight_path
from recipec.compiler.plan.hlo.parse import OP_NAME, Instruction, Module, parse
from recipec.compiler.plan.results import OutOfMemory, Temporary

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
    files = [next(folder.glob(name), None) for name in (MODULE, ASSIGNED, NEXT)]
    written = tuple(path.stat().st_size for path in files if path is not None)
    return written if len(written) == len(files) and all(written) else None


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
        if instruction.index is None or instruction.operands != (tuples[0].name,):
            return instruction
        number = str(instruction.index)
        return replace(
            instruction, opcode="parameter", operands=(), literal=number, op_name=names.get(number, "")
        )

    renamed = {**module.computations, module.entry: tuple(map(of, entry))}
    return replace(module, computations=renamed)


def _dump(folder: Path, pattern: str) -> str:
    """Read the file that XLA dumped under a name of this pattern."""
    file = next(folder.glob(pattern), None)
    if file is None:
        raise FileNotFoundError(f"libtpu wrote no {pattern}: install the libtpu that recipec pins")
    return file.read_text(encoding="utf-8")


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"(\d+(?:\.\d+)?)([KMGT]?)i?B?"
FORMS = (
    re.compile(rf"Ran out of memory on HBM.*?\({SIZE}\) exceeds available HBM \({SIZE}\)", re.DOTALL),
    re.compile(rf"Ran out of memory in memory space hbm\b.*?Used {SIZE} of {SIZE} hbm", re.DOTALL),
    re.compile(rf"unlikely to have enough device memory. Requires {SIZE}, has {SIZE} available", re.DOTALL),
)
VMEM = re.compile(
    r"in memory space vmem while allocating on stack for %(\S+) = .*?"
    r"size (\S+) and limit (\S+) exceeded scoped vmem limit",
    re.DOTALL,
)
LIST = re.compile(r"Largest program allocations in hbm:?")
ENTRY = re.compile(rf"^\s*\d+\. Size: {SIZE}\s*$", re.MULTILINE)
SHAPE = re.compile(r"Shape: (\w+\[[\d,]*\])")
REFUSED = "*.oom_intermediate_module.txt"
"""The file that libtpu dumps of a program that it refuses."""


def dump_options(folder: Path) -> dict[str, str | bool]:
    """Return XLA's options for `jax.stages.Lowered.compile` that dump a program's text into a folder.

    They do not change the program.
    """
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def parse_refusal(message: str, dump: Path | None = None) -> OutOfMemory | None:
    """Return the bytes that a program needs and may use, or None for a message about anything else.

    Args:
        dump: the folder of `dump_options`. The largest arrays are read from it if the message does not list
            them.
    """
    refusal = next((match for form in FORMS if (match := form.search(message))), None)
    if refusal is None:
        return None
    listed = _largest(message) or (_dumped(dump) if dump else ())
    return OutOfMemory(_bytes(refusal[1], refusal[2]), _bytes(refusal[3], refusal[4]), listed)


def parse_vmem(message: str) -> tuple[str, str, str] | None:
    """Return the name of a kernel that needs more VMEM than the flags allow, its need and its limit.

    The sizes are as libtpu writes them. Return None for a message about anything else.
    """
    match = VMEM.search(message)
    return None if match is None else (match[1], match[2], match[3])


def _dumped(folder: Path) -> tuple[Temporary, ...]:
    files = sorted(folder.glob(REFUSED))
    return largest(parse(files[-1].read_text(encoding="utf-8")))[1] if files else ()


def _bytes(number: str, unit: str) -> float:
    return float(number) * UNITS[unit]


def _largest(message: str) -> tuple[Temporary, ...]:
    """Return the list's entries; entries of the same name and shape are joined."""
    start = LIST.search(message)
    if start is None:
        return ()
    text = message[start.end() :]
    entries = list(ENTRY.finditer(text))
    ends = [entry.start() for entry in entries[1:]] + [len(text)]
    sizes: dict[tuple[str, str], list[float]] = {}
    for entry, end in zip(entries, ends, strict=True):
        about = text[entry.end() : end]
        shape = SHAPE.search(about)
        key = _name(about), shape[1] if shape else ""
        sizes.setdefault(key, []).append(_bytes(entry[1], entry[2]))
    arrays = [Temporary(name, shape, len(lengths), sum(lengths)) for (name, shape), lengths in sizes.items()]
    return tuple(sorted(arrays, key=lambda array: -array.bytes))


def _name(about: str) -> str:
    """Name an array as `compiler.plan.hlo.names` does, but without the weight, which the message lacks."""
    note = OP_NAME.search(about)
    if note is None:
        return "unnamed"
    if not note[1].startswith("jit("):
        return weight_path(note[1])
    what, phase = operation(note[1])
    return f"{what}{f' ({phase})' if phase else ''}"
