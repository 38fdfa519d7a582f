"""Tests of which arrays of a compiled program are alive at once, on shortened programs of libtpu."""

from __future__ import annotations

import pytest

from recipec.compiler.plan.hlo.liveness import largest, operation, weight_path
from recipec.compiler.plan.hlo.parse import parse

MIB = 2**20
BIG = "bf16[1024,512]{1,0:T(8,128)(2,1)}"
SHARED = '"aliasing_operands":{"lists":[{"indices":["0","1"]}]}'
"""The backend's note that result 0 of an operation may share the memory of that operand."""


def module(*entry: str, others: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in entry)
    head = f"HloModule jit__train, is_scheduled=true\n\n{others}ENTRY %main.1_spmd (p.0: s32[]) -> s32[]"
    return f"{head} {{\n{lines}\n}}\n\n"


def fusion(name: str, *operands: str, shape: str = BIG, config: str = '"flag_configs":[]') -> str:
    read = ", ".join(f"%{operand}" for operand in operands)
    return f"%{name} = {shape} fusion({read}), kind=kLoop, calls=%fused, backend_config={{{config}}}"


def parameter(number: int, note: str = "", shape: str = BIG) -> str:
    metadata = f', metadata={{op_name="{note}"}}' if note else ""
    return f"%p.{number} = {shape} parameter({number}), sharding={{replicated}}{metadata}"


def peak(text: str) -> float:
    return largest(parse(text))[0] / MIB


def test_an_array_lives_from_its_definition_to_its_last_use() -> None:
    text = module(
        parameter(0),
        fusion("a", "p.0"),
        fusion("b", "a"),
        fusion("c", "b", "a"),  # a, b, c
        fusion("d", "c"),
        fusion("e", "d"),
        "ROOT %tuple.1 = (" + BIG + ") tuple(%e)",
    )
    assert peak(text) == 3
    assert [t.count for t in largest(parse(text))[1]] == [3]


def test_arguments_and_results_are_not_temporaries() -> None:
    text = module(
        parameter(0),
        "%copy.1 = " + BIG + " copy(%p.0)",
        fusion("a", "copy.1"),
        "ROOT %tuple.1 = (" + BIG + ") tuple(%a)",
    )
    assert peak(text) == 1  # the copy; `a` is a result


def test_aliased_arrays_count_once_until_their_last_use() -> None:
    text = module(
        parameter(0),
        fusion("a", "p.0"),
        "%bitcast.1 = bf16[512,1024]{0,1:T(8,128)(2,1)} bitcast(%a)",
        "%tuple.1 = (bf16[512,1024]{0,1:T(8,128)(2,1)}, " + BIG + ") tuple(%bitcast.1, %p.0)",
        "%opt-barrier.1 = (bf16[512,1024]{0,1:T(8,128)(2,1)}, " + BIG + ") opt-barrier(%tuple.1)",
        fusion("b", "p.0"),
        fusion("c", "b"),  # a, b, c: a later line reads a
        "%get-tuple-element.1 = bf16[512,1024]{0,1:T(8,128)(2,1)} get-tuple-element(%opt-barrier.1), index=0",
        fusion("d", "get-tuple-element.1", shape="f32[]{:T(128)}"),
        "ROOT %tuple.2 = (f32[]{:T(128)}) tuple(%d)",
    )
    assert round(peak(text), 2) == 3


@pytest.mark.parametrize(("later", "expected"), [(False, 1), (True, 2)])
def test_result_reuses_operand_memory_only_without_a_later_read(later: bool, expected: int) -> None:
    text = module(
        parameter(0),
        fusion("a", "p.0"),
        fusion("b", "a", config=SHARED),
        fusion("c", "b", *(["a"] if later else []), shape="f32[]{:T(128)}"),
        "ROOT %tuple.1 = (f32[]{:T(128)}) tuple(%c)",
    )
    assert round(peak(text), 2) == expected


def test_vmem_and_host_arrays_take_no_hbm() -> None:
    vmem, host = BIG.replace("}", "S(1)}"), BIG.replace("}", "S(5)}")
    text = module(
        parameter(0),
        fusion("a", "p.0"),
        f"%copy-start.1 = ({vmem}, {BIG}, u32[]{{:S(2)}}) copy-start(%a)",
        f"%copy-done.1 = {vmem} copy-done(%copy-start.1)",
        fusion("b", "copy-done.1", shape=host),
        fusion("c", "b", shape="f32[]{:T(128)}"),
        "ROOT %tuple.1 = (f32[]{:T(128)}) tuple(%c)",
    )
    assert round(peak(text), 2) == 1


def test_collective_in_flight_keeps_its_operand_alive() -> None:
    text = module(
        parameter(0),
        fusion("a", "p.0"),
        f"%collective-permute-start.1 = ({BIG}, {BIG}, u32[]{{:S(2)}}, u32[]{{:S(2)}}) "
        "collective-permute-start(%a), channel_id=19, source_target_pairs={{0,1},{1,0}}",
        fusion("b", "p.0"),  # a, the received array, b
        f"%collective-permute-done.1 = {BIG} collective-permute-done(%collective-permute-start.1)",
        fusion("c", "collective-permute-done.1", "b", shape="f32[]{:T(128)}"),
        "ROOT %tuple.1 = (f32[]{:T(128)}) tuple(%c)",
    )
    assert round(peak(text), 2) == 3


def test_kernel_output_aliased_to_an_operand_counts_once() -> None:
    text = module(
        parameter(0),
        fusion("a", "p.0"),
        f'%kernel.1 = ({BIG}, {BIG}) custom-call(%p.0, %a), custom_call_target="tpu_custom_call", '
        "output_to_operand_aliasing={{1}: (1, {})}",
        f"%get-tuple-element.1 = {BIG} get-tuple-element(%kernel.1), index=1",
        fusion("b", "get-tuple-element.1", shape="f32[]{:T(128)}"),
        "ROOT %tuple.1 = (f32[]{:T(128)}) tuple(%b)",
    )
    assert round(peak(text), 2) == 2


CARRIED = f"(s32[]{{:T(128)}}, {BIG}, {BIG})"
TYPES = "(s32[], bf16[1024,512], bf16[1024,512])"
NOTE = 'op_name="jit(_train)/jvp()/while/body/closed_call/jvp(BTD,DV->BTV)/dot_general"'
WRITTEN = SHARED.replace('"0","1"', '"0","2"')
LOOP = f"""%body.1 (arg.1: {TYPES}) -> {TYPES} {{
  %arg.1 = {CARRIED} parameter(0)
  %get-tuple-element.10 = s32[]{{:T(128)}} get-tuple-element(%arg.1), index=0
  %get-tuple-element.11 = {BIG} get-tuple-element(%arg.1), index=1
  %get-tuple-element.12 = {BIG} get-tuple-element(%arg.1), index=2
  {fusion("logits", "get-tuple-element.12", "get-tuple-element.10", shape=BIG.replace("1024", "2048"))}
  {fusion("in_place", "get-tuple-element.11", "logits", config=WRITTEN)}
  ROOT %tuple.10 = {CARRIED} tuple(%get-tuple-element.10, %in_place, %get-tuple-element.12)
}}

%condition.1 (arg.2: {TYPES}) -> pred[] {{
  %arg.2 = {CARRIED} parameter(0)
  ROOT %constant.1 = pred[]{{:T(512)}} constant(true)
}}

""".replace("calls=%fused,", f"calls=%fused, metadata={{{NOTE}}},", 1)


def test_loop_counts_its_carried_array_once_and_adds_its_body_arrays() -> None:
    text = module(
        parameter(0, "base['lm_head']['w'].value"),
        "%zero = s32[]{:T(128)} constant(0)",
        f'%custom-call.1 = {BIG} custom-call(), custom_call_target="AllocateBuffer"',
        f"%tuple.1 = {CARRIED} tuple(%zero, %custom-call.1, %p.0)",
        f"%while.1 = {CARRIED} while(%tuple.1), condition=%condition.1, body=%body.1",
        f"%get-tuple-element.1 = {BIG} get-tuple-element(%while.1), index=1",
        fusion("c", "get-tuple-element.1", shape="f32[]{:T(128)}"),
        "ROOT %tuple.2 = (f32[]{:T(128)}) tuple(%c)",
        others=LOOP,
    )
    bytes, arrays = largest(parse(text))
    assert bytes == 3 * MIB  # the carried array once, and the logits; not the weight
    assert [(a.name, a.shape, a.bytes) for a in arrays] == [
        ("lm_head.w / loop / BTD,DV->BTV", "bf16[2048,512]", 2 * MIB),
        ("custom-call", "bf16[1024,512]", MIB),
    ]


def test_largest_arrays_are_grouped_by_weight_across_layers() -> None:
    note = "jit(_train)/transpose(jvp(jvp()))/checkpoint/rematted_computation/dot_general"
    lines = [parameter(n, f"base['layers'][{n}]['mlp']['up_proj']['kernel'].value") for n in (0, 1)]
    for n in (0, 1):
        lines.append(
            f"%all-gather.{n} = bf16[4096,512]{{1,0:T(8,128)(2,1)}} all-gather(%p.{n}), dimensions={{0}}"
        )
    for n in (0, 1):
        lines.append(
            f"%product.{n} = {BIG} fusion(%all-gather.{n}), kind=kOutput, calls=%fused, "
            f'metadata={{op_name="{note}" stack_frame_id=9}}'
        )
    lines[-2] = lines[-2].replace("(%all-gather.0)", "(%all-gather.0, %all-gather.1)")
    lines[-1] = lines[-1].replace("(%all-gather.1)", "(%all-gather.1, %all-gather.0)")
    lines += [
        fusion("c", "product.0", "product.1", shape="f32[]{:T(128)}"),
        "ROOT %tuple.2 = (f32[]{:T(128)}) tuple(%c)",
    ]
    bytes, arrays = largest(parse(module(*lines)))
    assert bytes == 10 * MIB
    assert [(a.name, a.shape, a.count, a.bytes) for a in arrays] == [
        ("layers.{}.mlp.up_proj.kernel / all-gather", "bf16[4096,512]", 2, 8 * MIB),
        ("layers.{}.mlp.up_proj.kernel / dot_general (recomputed)", "bf16[1024,512]", 2, 2 * MIB),
    ]
    assert len(largest(parse(module(*lines)), most=1)[1]) == 1


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        ("jit(_train)/jvp()/mul", ("mul", "")),
        ("jit(_train)/jvp(attention)/einsum/BSD,DKH->BSKH/dot_general", ("attention / BSD,DKH->BSKH", "")),
        ("jit(_train)/transpose(jvp(BTr,rD->BTD))/dot_general", ("BTr,rD->BTD", "backward")),
        (
            "jit(_train)/transpose(jvp(jvp()))/checkpoint/rematted_computation/feed_forward/dot_general",
            ("feed_forward / dot_general", "recomputed"),
        ),
        ("jit(_train)/cond/branch_0_fun/jit(_where)/select_n", ("select_n", "update")),
        ("jit(_train)/add", ("add", "update")),
        ("jit(_train)/jvp()/checkpoint/linear/aten::mul.Tensor/mul", ("linear / mul", "")),
        ("jit(_train)/jvp(layer_17)/attention/rope/sub", ("layers.{} / attention / rope / sub", "")),
        (
            "jit(_train)/jvp()/shard_map/vmap(static_sparsity_splash)/jit(_splash_attention)/"
            "splash_mha_fwd_segmented_residuals/splash_mha_fwd_segmented_residuals/pallas_call",
            ("splash_mha_fwd_segmented_residuals", ""),
        ),
        (
            "jit(_train)/transpose(jvp())/shard_map/jit(_splash_attention)/squeeze;broadcast_in_dim",
            ("squeeze", "backward"),
        ),
    ],
)
def test_operation_is_parsed_from_op_name_metadata(note: str, expected: tuple[str, str]) -> None:
    assert operation(note) == expected


@pytest.mark.parametrize(
    ("note", "expected"),
    [
        (r"base[\'layers\'][17][\'attn\'][\'q_proj\'][\'w\'].value", "layers.{}.attn.q_proj.w"),
        ("live[1]['opt_state'][2][0]['mu']['layers'][0]['mlp']['w'].value", "mu.layers.{}.mlp.w"),
        ("base['model.layers.17.mlp.up_proj.base_layer.weight']", "layers.{}.mlp.up_proj.weight"),
        ("live[1][1][0].mu['layers.3.self_attn.q_proj.lora_A']", "mu.layers.{}.self_attn.q_proj.lora_A"),
        ("batch['segment_ids']", "segment_ids"),
        ("x", "x"),
    ],
)
def test_weight_path_is_parsed_from_op_name_metadata(note: str, expected: str) -> None:
    assert weight_path(note) == expected


def test_copy_of_an_operand_without_an_array_has_arrays_of_its_own() -> None:
    text = module(
        f"%copy-start.1 = ({BIG}, {BIG}, u32[]{{:S(2)}}) copy-start(%elsewhere)",
        f"%copy-done.1 = {BIG} copy-done(%copy-start.1)",
        fusion("a", "copy-done.1"),
        "ROOT %tuple.1 = (" + BIG + ") tuple(%a)",
    )
    assert peak(text) == 2
