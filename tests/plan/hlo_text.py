"""HLO modules for tests, as a TPU's compiler writes them."""

from __future__ import annotations

from recipec.compiler.plan.hlo.parse import Module, parse

HEADER = """HloModule jit__train, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

FileNames
1 "runtime/training/step.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}

"""


def module(entry: str, *computations: str) -> Module:
    """Parse a module.

    Args:
        entry: the instructions of its entry computation.
        computations: the other computations, each with its name on the first line.
    """
    others = "".join(_computation(*text.strip().split("\n", 1)) for text in computations)
    return parse(HEADER + others + "ENTRY " + _computation("main.1_spmd", entry))


def _computation(name: str, instructions: str) -> str:
    lines = "\n".join("  " + line.strip() for line in instructions.strip().split("\n"))
    return f"%{name.strip()} (param: f32[8,128]) -> f32[8,128] {{\n{lines}\n}}\n\n"
