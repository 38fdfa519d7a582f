"""libtpu's message about a program that does not fit, read.

It has several forms. Most programs are refused once their arrays are counted, with the sum alone:

    RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.09G)
    exceeds available HBM (15.75G).

The sum is of arguments, results and temporaries together. Which arrays they are stands in the program that
the compiler had by then, when it is told to leave its text in a folder. Another form lists the largest arrays
itself. VMEM, which a kernel may exhaust, is another memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from recipec.compiler.plan.hlo.liveness import largest
from recipec.compiler.plan.hlo.names import operation, weight_path
from recipec.compiler.plan.hlo.parse import parse
from recipec.compiler.plan.results import OutOfMemory, Temporary

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
OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
SHAPE = re.compile(r"Shape: (\w+\[[\d,]*\])")
REFUSED = "*.oom_intermediate_module.txt"
"""The file that libtpu leaves of a program that it refuses."""


def dump_options(folder: Path) -> dict[str, str | bool]:
    """XLA's options, for `jax.stages.Lowered.compile`, that have it leave a program's text in a folder. They
    do not change the program."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def parse_refusal(message: str, dump: Path | None = None) -> OutOfMemory | None:
    """What libtpu asked for and has, bytes; None for a message about anything else.

    Args:
        dump: the folder of `dump_options`, from which the largest arrays are read when the message does not
            list them.
    """
    found = next((match for form in FORMS if (match := form.search(message))), None)
    if found is None:
        return None
    listed = _largest(message) or (_dumped(dump) if dump else ())
    return OutOfMemory(_bytes(found[1], found[2]), _bytes(found[3], found[4]), listed)


def parse_vmem(message: str) -> tuple[str, str, str] | None:
    """Of a kernel that needs more VMEM than flags leave it: its name, what it needs and has, as libtpu writes
    sizes; None for a message about anything else."""
    found = VMEM.search(message)
    return None if found is None else (found[1], found[2], found[3])


def _dumped(folder: Path) -> tuple[Temporary, ...]:
    files = sorted(folder.glob(REFUSED))
    return largest(parse(files[-1].read_text(encoding="utf-8")))[1] if files else ()


def _bytes(number: str, unit: str) -> float:
    return float(number) * UNITS[unit]


def _largest(message: str) -> tuple[Temporary, ...]:
    """The list's entries, those of the same name and shape as one."""
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
    arrays = [Temporary(name, shape, len(found), sum(found)) for (name, shape), found in sizes.items()]
    return tuple(sorted(arrays, key=lambda array: -array.bytes))


def _name(about: str) -> str:
    """As of `compiler.plan.hlo.names`; the weight that an operation reads is not to be seen here."""
    note = OP_NAME.search(about)
    if note is None:
        return "unnamed"
    if not note[1].startswith("jit("):
        return weight_path(note[1])
    what, phase = operation(note[1])
    return f"{what}{f' ({phase})' if phase else ''}"
