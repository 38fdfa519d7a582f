"""Read a step's memory from its compiles, made now or by an earlier plan."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from recipec.compiler import store
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan import identity
from recipec.compiler.plan.depth import parts
from recipec.compiler.plan.results import COMPILED, Compiled, Job, Memory
from recipec.compiler.roofline.rollout import kept_bytes

TIMES = ("schedule", "prices")
"""Fields of a result that only its time depends on. They are most of its text, and memory needs none."""


def memory(program: Program, compiled: Sequence[Compiled]) -> Memory:
    """Return the memory of a program's step on one device.

    Args:
        compiled: as for `estimate.estimate`.
    """
    whole, few = with_refusal(compiled[0]), compiled[-1]
    by_shape = whole.weights + whole.adapters + whole.optimizer + whole.batch
    return Memory(
        weights=whole.weights,
        adapters=whole.adapters,
        optimizer=whole.optimizer,
        batch=whole.batch,
        padding=max(0.0, whole.arguments - by_shape),
        temporaries=whole.temporaries,
        code=code_bytes(whole, few),
        available=program.accelerator.hbm_bytes_per_device,
        rollout=kept_bytes(program),
    )


def remembered(program: Program) -> Memory | None:
    """Return the memory of a program from the cache, or None if it was not planned before.

    Nothing is compiled.
    """
    compiles = []
    for part in parts(program).refined:
        work = Job(Path(program.source).resolve(), (), part.layers, scheduled=part.scheduled)
        text = store.get(identity.name(program, work))
        if text is None:
            return None
        try:
            kept = {key: value for key, value in json.loads(text).items() if key not in TIMES}
            compiles.append(COMPILED.validate_json(json.dumps(kept)))
        except (ValueError, AttributeError):  # damaged
            return None
    return memory(program, compiles)


def with_refusal(compiled: Compiled) -> Compiled:
    """Fill in the memory of a step that the compiler refused, from the compiler's message."""
    refused = compiled.out_of_memory
    if refused is None:
        return compiled
    arguments = compiled.weights + compiled.adapters + compiled.optimizer + compiled.batch
    rest = max(0.0, refused.used - arguments)
    return replace(compiled, arguments=arguments, temporaries=rest, largest=refused.largest)


def code_bytes(whole: Compiled, few: Compiled) -> float:
    """Estimate the bytes of all layers' code, from the bytes per instruction of the few compiled layers.

    docs/benchmarks.md compares it with the code of all layers compiled to the end.
    """
    if few.layers == whole.layers or not few.instructions:
        return whole.code
    return few.code * whole.instructions / few.instructions + whole.code
