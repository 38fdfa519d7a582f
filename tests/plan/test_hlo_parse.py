"""Tests of the parser of HLO modules."""

from __future__ import annotations

import pytest

from recipec.compiler.plan.hlo.parse import Array, Module, parse
from tests.plan.hlo_text import module

TEXT = """HloModule jit__train, is_scheduled=true, entry_computation_layout={(f32[8,128]{1,0})->f32[]}

FileNames
1 "runtime/training/step.py"

StackFrames
1 {file_location_id=1 parent_frame_id=1}


%add.1 (x: f32[], y: f32[]) -> f32[] {
  %x = f32[]{:T(128)} parameter(0)
  %y = f32[]{:T(128)} parameter(1)
  ROOT %add.2 = f32[]{:T(128)} add(%x, %y), metadata={op_name="jit(_train)/jvp()/reduce_sum"}
}

%copies (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0:T(8,128)} parameter(0)
  ROOT %copy.9 = f32[8,128]{1,0:T(8,128)} copy(%p)
}, execution_thread="sparsecore"

ENTRY %main.3_spmd (param.1: f32[8,128], param.2: s32[]) -> (f32[], f32[8,128]) {
  %param.2 = s32[]{:T(128)} parameter(1)
  %constant.5..sunk = f32[]{:T(128)} constant(-1.5e-06), metadata={op_name="jit(f)/(a, %b)" stack_frame_id=3}
  %param.1 = f32[8,128]{1,0:T(8,128)} parameter(0), sharding={devices=[4,2]<=[8]}
  %start.1 = ((f32[8,128]{1,0:T(8,128)}), f32[8,128]{1,0:T(8,128)S(1)}, u32[]{:S(2)}) async-start(\
%param.1), calls=%copies
  %kernel.3 = (f32[512,128]{1,0:T(8,128)}, bf16[2,3,4]{2,1,0:T(8,128)(2,1)}, /*index=2*/token[]) \
custom-call(%param.1, /*index=1*/%constant.5..sunk), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 512, \\"layout\\": ")}"}"
}}, metadata={op_name="jit(_train)/jvp()/splash/pallas_call" stack_frame_id=148}, \
backend_config={"body":"TUzv%x"}
  %reduce.4 = f32[]{:T(128)} reduce(f32[8,128]{1,0:T(8,128)} %param.1, %constant.5..sunk), \
dimensions={0,1}, to_apply=%add.1
  %cond.6 = f32[]{:T(128)} conditional(%param.2, %reduce.4, %reduce.4), branch_computations={%add.1, %copies}
  ROOT %tuple.7 = (f32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%reduce.4, %param.1)
}
"""


def test_parser_reads_computations_names_operands_and_calls() -> None:
    read = parse(TEXT)
    assert list(read.computations) == ["add.1", "copies", "main.3_spmd"]
    assert read.entry == "main.3_spmd"
    names = ["param.2", "constant.5..sunk", "param.1", "start.1", "kernel.3", "reduce.4", "cond.6", "tuple.7"]
    assert [i.name for i in read.computations["main.3_spmd"]] == names
    named = read.by_name["main.3_spmd"]
    assert named["param.2"].literal == "1" and named["param.2"].operands == ()
    assert named["constant.5..sunk"].literal == "-1.5e-06"
    assert named["constant.5..sunk"].op_name == "jit(f)/(a, %b)"
    assert named["reduce.4"].operands == ("param.1", "constant.5..sunk")
    assert named["reduce.4"].calls == ("add.1",)
    assert named["cond.6"].calls == ("add.1", "copies")
    assert named["tuple.7"].root and not named["reduce.4"].root
    assert named["start.1"].calls == ("copies",)
    assert [array.memory_space for array in named["start.1"].arrays] == [0, 1, 2]


def test_multi_line_attributes_belong_to_one_instruction() -> None:
    kernel = parse(TEXT).by_name["main.3_spmd"]["kernel.3"]
    assert kernel.opcode == "custom-call"
    assert kernel.operands == ("param.1", "constant.5..sunk")
    assert kernel.arrays == (
        Array("f32", (512, 128), 512 * 128 * 4),
        Array("bf16", (2, 3, 4), 2 * 8 * 128 * 2),
    )
    assert kernel.op_name == "jit(_train)/jvp()/splash/pallas_call"
    assert kernel.attributes.startswith('custom_call_target="tpu_custom_call"')
    assert kernel.attributes.endswith('backend_config={"body":"TUzv%x"}')


@pytest.mark.parametrize("text", ["", "no module\n", "HloModule m\n\n%f (p: f32[]) -> f32[] {\n}\n"])
def test_text_without_an_entry_computation_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="no entry computation"):
        parse(text)


@pytest.mark.parametrize(
    "shape, size",
    [
        ("f32[7,9]", 7 * 9 * 4),
        ("f32[]{:T(128)}", 128 * 4),
        ("bf16[3072,5376]{1,0:T(8,128)(2,1)}", 3072 * 5376 * 2),
        ("f32[5,130]{1,0:T(8,128)}", 8 * 256 * 4),
        ("f32[5,130]{0,1:T(8,128)}", 136 * 128 * 4),
        ("f32[3,7,5]{0,2,1:T(8,128)}", 7 * 8 * 128 * 4),
        ("bf16[4,9,8,1]{2,0,3,1:T(8,128)(2,1)}", 9 * 1 * 8 * 128 * 2),
        ("bf16[1]{0:T(256)(128)(2,1)}", 256 * 2),
        ("s32[300]{0:T(128)}", 384 * 4),
        ("s8[1,6,3]{2,1,0:T(8,128)(4,1)}", 8 * 128),
        ("pred[12,1,256]{2,1,0:T(4,128)(4,1)}", 12 * 4 * 256),
        ("f32[12,1,256]{2,1,0:T(1,128)S(1)}", 12 * 256 * 4),
        ("f8e4m3fn[8,100]{1,0:T(8,128)(4,1)}", 8 * 128),
        ("s4[16,256]{1,0:T(8,128)(8,1)E(4)}", 16 * 256 // 2),
        ("s4[16,256]{1,0}", 16 * 256),
        ("s32[<=5]{0:T(128)}", 128 * 4),
    ],
)
def test_arrays_take_the_bytes_of_their_padded_tiles(shape: str, size: int) -> None:
    (instruction,) = module(f"ROOT %p = {shape} parameter(0)").computations["main.1_spmd"]
    assert [array.bytes for array in instruction.arrays] == [size]


STATE = "(s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}, s32[]{:T(128)})"


def loop(condition: str, step: str, start: str, *more: str) -> Module:
    """Parse a module with a loop over a counter and a limit.

    Args:
        condition: instructions on %i, the counter, and %limit, which the loop carries.
        step: the instructions that compute %next from %i.
        start: an instruction that defines the counter's start, %start.
        more: other computations.
    """
    given = f"""%p = {STATE} parameter(0)
        %i = s32[]{{:T(128)}} get-tuple-element(%p), index=0
        %x = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%p), index=1
        %limit = s32[]{{:T(128)}} get-tuple-element(%p), index=2
        %one = s32[]{{:T(128)}} constant(1)
        %two = s32[]{{:T(128)}} constant(2)
        """
    return module(
        f"""%start = {start}
        %x = f32[8,128]{{1,0:T(8,128)}} parameter(0)
        %twenty = s32[]{{:T(128)}} constant(20)
        %init = {STATE} tuple(%start, %x, %twenty)
        %while.1 = {STATE} while(%init), condition=%cond, body=%body
        ROOT %result = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%while.1), index=1""",
        *more,
        "cond\n" + given + condition,
        "body\n" + given + step + f"\nROOT %state = {STATE} tuple(%next, %x, %limit)",
    )


UP = "%next = s32[] add(%i, %one)"
TWO_UP = "%next = s32[] add(%two, %i)"
DOWN = "%minus = s32[] constant(-3)\n%next = s32[] add(%i, %minus)"
TWELVE = "%twelve = s32[]{:T(128)} constant(12)\n"
ZERO = "s32[]{:T(128)} constant(0)"


def compared(left: str, right: str, direction: str) -> str:
    return f"ROOT %lt = pred[]{{:T(512)}} compare({left}, {right}), direction={direction}"


@pytest.mark.parametrize(
    "condition, step, start, count",
    [
        (TWELVE + compared("%i", "%twelve", "LT"), UP, ZERO, 12),
        (TWELVE + compared("%twelve", "%i", "GT"), UP, ZERO, 12),
        (TWELVE + compared("%i", "%twelve", "LE"), UP, ZERO, 13),
        (TWELVE + compared("%i", "%twelve", "NE"), UP, ZERO, 12),
        (TWELVE + compared("%i", "%twelve", "LT"), TWO_UP, "s32[] constant(1)", 6),
        (compared("%i", "%limit", "LT"), UP, "s32[] constant(4)", 16),
        (compared("%i", "%one", "GE"), DOWN, "s32[] constant(12)", 4),
        (TWELVE + compared("%i", "%twelve", "LT"), UP, "s32[] constant(12)", 0),
        # The start is unknown, and jax's loops start at 0.
        (TWELVE + compared("%i", "%twelve", "LT"), UP, "s32[] parameter(1)", 12),
    ],
)
def test_trip_count_follows_from_condition_step_and_start(
    condition: str, step: str, start: str, count: int
) -> None:
    read = loop(condition, step, start)
    assert read.trip_counts == {"body": count}


def test_trip_count_of_a_fused_condition_and_step() -> None:
    condition = "%c = s32[] constant(7)\nROOT %f = pred[] fusion(%c, %i), kind=kLoop, calls=%fused_cond"
    step = (
        "%f = (s32[], f32[8,128]{1,0}) fusion(%x, %i), kind=kLoop, calls=%fused_step\n"
        "%next = s32[] get-tuple-element(%f), index=0"
    )
    fused_condition = f"""fused_cond
        %a = s32[] parameter(0)
        %b = s32[] parameter(1)
        {compared("%b", "%a", "LT")}"""
    fused_step = """fused_step
        %a = f32[8,128]{1,0} parameter(0)
        %b = s32[] parameter(1)
        %three = s32[] constant(3)
        %s = s32[] add(%b, %three)
        ROOT %t = (s32[], f32[8,128]{1,0}) tuple(%s, %a)"""
    assert loop(condition, step, ZERO, fused_condition, fused_step).trip_counts == {"body": 3}


@pytest.mark.parametrize(
    "condition",
    ["ROOT %go = pred[] custom-call(%i)", compared("%i", "%next", "LT"), compared("%x", "%i", "EQ")],
)
def test_loop_with_an_unreadable_condition_has_no_trip_count(condition: str) -> None:
    read = loop(condition, UP, ZERO)
    assert read.trip_counts == {}


def test_elements_of_tuples_that_newer_texts_only_refer_to_are_instructions() -> None:
    text = """HloModule jit, is_scheduled=true

%body (p.1: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %p.1 = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%p.1#0, %one)
  ROOT %t.1 = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) tuple(%next, %p.1#1)
}

%condition (p.2: (s32[], bf16[8,128])) -> pred[] {
  %end = s32[]{:T(128)} constant(8)
  %p.2 = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %lt = pred[]{:T(512)} compare(%p.2#0, %end), direction=LT
}

ENTRY %main (a: (s32[], bf16[8,128])) -> (s32[], bf16[8,128]) {
  %a = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) parameter(0)
  ROOT %loop = (s32[]{:T(128)}, bf16[8,128]{1,0:T(8,128)(2,1)}) while(%a), condition=%condition, body=%body
}

"""
    read = parse(text)
    assert read.trip_counts == {"body": 8}
    element = read.by_name["body"]["p.1#1"]
    assert (element.opcode, element.operands, element.attributes) == (
        "get-tuple-element",
        ("p.1",),
        "index=1",
    )
    assert element.arrays == (Array("bf16", (8, 128), 2048),)
    assert [i.name for i in read.computations["body"]] == ["p.1", "one", "p.1#0", "next", "p.1#1", "t.1"]
