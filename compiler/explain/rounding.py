"""Describe quantization-aware training."""

from __future__ import annotations

from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.run_length import run_length
from recipec.compiler.wording import plural, rounded


def rounding(program: Program) -> list[str]:
    """Describe what train.qat rounds; [] for nothing."""
    qat, length = program.recipe.train.qat, run_length(program.recipe, program.source.parent)
    if qat is None:
        return []
    places = "all projections" if program.lora is None else "the adapted projections"
    if qat.head:
        places += " and the head"
    out = [
        f"{places} are computed with rounded operands: {rounded(qat)}; gradients pass through the rounding"
    ]
    if qat.start_step:
        of = f" of {length.steps:,}" if length.exact and length.steps else ""
        out.append(f"the first {plural(qat.start_step, 'step')}{of} are not rounded")
    return [*out, "checkpoints and merged weights are not rounded: quantize the merged model afterwards"]
