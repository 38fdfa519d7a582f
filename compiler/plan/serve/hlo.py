"""What the text of a compiled serving step says: the compiler's cycles, collectives and attention kernels.

Its layers are not in a loop, so that every line of the entry computation runs once.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from recipec.compiler.plan.results import Collective

_LINE = re.compile(r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<type>.*?) (?P<opcode>[a-z][\w-]*)\(")
_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_ARRAY = re.compile(r"\b([a-z]+\d+\w*|pred)\[([\d,]*)\]")
_KERNEL = re.compile(r"RPA(?P<case>[dpm])-p_\d+-bq_\d+_\d+-bkv_(?P<block>\d+)_\d+(?:-sw_(?P<window>\d+))?")

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
AXIS = "model"
"""The only axis of a replica's mesh that has more than one device."""


@dataclass(frozen=True)
class AttentionKernel:
    """A ragged paged attention kernel, by its name.

    Attributes:
        decode: whether it is the one for sequences with a single new token.
        block: tokens of the cache that it fetches at a time.
        window: tokens that it attends to, None for all.
    """

    decode: bool
    block: int
    window: int | None


def attention_kernel(name: str) -> AttentionKernel | None:
    """What a kernel's name says; None for a kernel of another kind."""
    match = _KERNEL.match(name)
    if match is None:
        return None
    window = int(match["window"]) if match["window"] else None
    return AttentionKernel(match["case"] == "d", int(match["block"]), window)


def read(text: str) -> tuple[float, tuple[Collective, ...], tuple[tuple[str, float], ...]]:
    """Cycles, collectives by kind, and how often each kernel runs.

    Args:
        text: as `jax.stages.Compiled.as_text()` gives it for a TPU.

    Raises:
        ValueError: the text has no entry computation.
    """
    cycles = 0.0
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    _, start, entry = text.partition("\nENTRY ")
    if not start:
        raise ValueError("the text has no entry computation")
    for line in entry.partition("\n}")[0].splitlines()[1:]:
        match = _LINE.match(line)
        if match is None:
            continue
        if found := _CYCLES.search(line):
            cycles += float(found[1])
        opcode = match["opcode"].removesuffix("-start")
        if opcode in KINDS:
            counts[opcode] += 1
            sizes[opcode] += _result_bytes(match["type"], opcode != match["opcode"])
        elif 'custom_call_target="tpu_custom_call"' in line:
            kernels[re.sub(r"\.\d+$", "", match["name"])] += 1
    collectives = tuple(
        Collective(kind, (AXIS,), False, counts[kind], float(sizes[kind])) for kind in sorted(counts)
    )
    return cycles, collectives, tuple((name, float(kernels[name])) for name in sorted(kernels))


def _result_bytes(shape: str, asynchronous: bool) -> int:
    """Bytes of a collective's result; the start of an asynchronous one holds its operand before it."""
    arrays = [math.prod(map(int, filter(None, d.split(",")))) * _item(t) for t, d in _ARRAY.findall(shape)]
    if asynchronous and len(arrays) > 1:
        return arrays[1]
    return sum(arrays)


def _item(dtype: str) -> int:
    """Bytes of a number: "bf16", "f8e4m3fn", "s32", "pred"."""
    if dtype == "pred":
        return 1
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1
