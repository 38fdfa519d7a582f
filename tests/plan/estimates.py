"""A made-up estimate of a step, with memory and time that a test chooses."""

from __future__ import annotations

from dataclasses import replace

from recipec.compiler.plan.results import Estimate, Memory, Temporary
from tests.plan import plans

GIB = 2**30


def estimate(temporaries: float, seconds: float = 1.0) -> Estimate:
    """Estimate a step with 20 GiB of arguments on devices of 95 GiB.

    Args:
        temporaries: GiB.
    """
    memory = Memory(14.5 * GIB, 1.5 * GIB, 3 * GIB, 0, 0, temporaries * GIB, 1 * GIB, 95 * GIB)
    largest = (
        Temporary("layers.{}.mlp.gate_proj.kernel / dot_general", "bf16[3072,21504]", 60, 7.38 * GIB),
        Temporary("embedder.input_embedding / all-gather", "bf16[262144,5376]", 1, 2.625 * GIB),
    )
    return replace(plans.ESTIMATE, memory=memory, largest=largest, seconds=seconds, rows=4, row_length=3072)
