"""Read libtpu's message about a program that does not fit.

The message has several forms. Usually libtpu refuses a program once it has counted the arrays, and gives only
the sum:

    RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.09G)
    exceeds available HBM (15.75G).

The sum is of arguments, results and temporaries together. The arrays are in the program's text, which the
compiler dumps into a folder on request. Another form of the message lists the largest arrays. A kernel can
also exhaust VMEM, a different memory, with a message of its own.
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
    found = next((match for form in FORMS if (match := form.search(message))), None)
    if found is None:
        return None
    listed = _largest(message) or (_dumped(dump) if dump else ())
    return OutOfMemory(_bytes(found[1], found[2]), _bytes(found[3], found[4]), listed)


def parse_vmem(message: str) -> tuple[str, str, str] | None:
    """Return the name of a kernel that needs more VMEM than the flags allow, its need and its limit.

    The sizes are as libtpu writes them. Return None for a message about anything else.
    """
    found = VMEM.search(message)
    return None if found is None else (found[1], found[2], found[3])


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
    arrays = [Temporary(name, shape, len(found), sum(found)) for (name, shape), found in sizes.items()]
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
