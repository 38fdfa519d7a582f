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


GATHER = "all-gather(%w), channel_id=7, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}"
PART, ALL = "f32[64,256]{1,0:T(8,128)}", "f32[256,256]{1,0:T(8,128)}"
OVERLAPPED = (
    f"""begins
    %w = {PART} parameter(0)
    %g = {ALL} {GATHER}
    ROOT %c = ({PART}, {ALL}, u32[]{{:S(2)}}) custom-call(%g), custom_call_target="AsyncCollectiveStart\"""",
    f"""goes_on
    %w = {PART} parameter(0)
    %r = {ALL} parameter(1)
    %s = u32[]{{:S(2)}} parameter(2)
    %x = {PART} parameter(3)
    %n = {PART} negate(%x)
    %g = {ALL} {GATHER}
    ROOT %t = ({PART}, {PART}, {ALL}, u32[]{{:S(2)}}) tuple(%n, %w, %g, %s)""",
    f"""ends
    %w = {PART} parameter(0)
    %r = {ALL} parameter(1)
    %s = u32[]{{:S(2)}} parameter(2)
    %g = {ALL} {GATHER}
    ROOT %c = {ALL} custom-call(%w, %r, %g, %s), custom_call_target="AsyncCollectiveDone\"""",
)
OVERLAPPED_ENTRY = f"""%w = {PART} parameter(0)
    %a = ({PART}, {ALL}, u32[]{{:S(2)}}) fusion(%w), kind=kCustom, \
output_to_operand_aliasing={{{{0}}: (0, {{}})}}, calls=%begins
    %a0 = {PART} get-tuple-element(%a), index=0
    %a1 = {ALL} get-tuple-element(%a), index=1
    %a2 = u32[]{{:S(2)}} get-tuple-element(%a), index=2
    %b = ({PART}, {PART}, {ALL}, u32[]{{:S(2)}}) fusion(%a0, %a1, %a2, %w), kind=kLoop, \
output_to_operand_aliasing={{{{1}}: (0, {{}}), {{2}}: (1, {{}}), {{3}}: (2, {{}})}}, calls=%goes_on
    %b1 = {PART} get-tuple-element(%b), index=1
    %b2 = {ALL} get-tuple-element(%b), index=2
    %b3 = u32[]{{:S(2)}} get-tuple-element(%b), index=3
    ROOT %c = {ALL} fusion(%b1, %b2, %b3), kind=kCustom, \
output_to_operand_aliasing={{{{}}: (1, {{}})}}, calls=%ends"""
