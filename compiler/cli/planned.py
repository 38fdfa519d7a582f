"""What earlier plans say about recipes that are checked."""

from __future__ import annotations

from collections.abc import Sequence

from recipec.compiler.lower import Lowered
from recipec.compiler.plan.fit import warning
from recipec.compiler.plan.step_memory import remembered
from recipec.spec.diagnostics import Diagnostic
from recipec.spec.load import Loaded, locate


def planned_before(pairs: Sequence[tuple[Loaded, Lowered]]) -> list[Diagnostic]:
    """Return the warnings of earlier plans of these recipes' steps, without compiling anything."""
    out: list[Diagnostic] = []
    for loaded, lowered in pairs:
        program = lowered.program
        if program is None or program.accelerator.platform != "tpu":
            continue
        memory = remembered(program)
        problem = None if memory is None else warning(program, memory)
        out += [] if problem is None else locate([problem], loaded.sources)
    return out
