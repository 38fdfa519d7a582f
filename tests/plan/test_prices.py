"""Tests of the prices of operations, of when two operations count as equal, and of what libtpu dumps."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.plan.hlo.assigned import (
    assignment,
    parse_refusal,
    parse_vmem,
    scheduled,
    sizes,
    untupled,
)
from recipec.compiler.plan.hlo.read_schedule import Fingerprints
from recipec.compiler.plan.results import OutOfMemory, Temporary
from recipec.compiler.plan.schedule import (
    Exposed,
    Loop,
    Operation,
    Prices,
    Schedule,
    Work,
    Worked,
    priced,
    prices,
)
from tests.plan.hlo_text import module

PRODUCT = Operation("a", "a-alike", "p", 1.0)
COPY = Operation("c", "c-alike", "", 2.0)
BARE = Operation("b", "b-alike", "", 0.5)
FOUND = prices([(PRODUCT, 3.0), (Operation("a2", "a-alike", "p", 1.0), 5.0), (COPY, 2.5), (BARE, None)])


@pytest.mark.parametrize(
    ("operation", "seconds", "known"),
    [
        (PRODUCT, 3.0, True),
        (BARE, 0.5, False),  # libtpu reported no cycles
        (Operation("a3", "a-alike", "p", 9.0), 4.0, True),  # in another memory: the mean
        (Operation("a4", "other", "p", 9.0), 4.0, True),  # the same products next to another operation
        (Operation("x", "x", "y", 2.0), 8.0, False),  # products took four times the longer of the two
        (Operation("x", "x", "", 2.0), 2.5, False),
    ],
)
def test_operation_takes_the_price_of_its_closest_match(
    operation: Operation, seconds: float, known: bool
) -> None:
    assert FOUND.of(operation) == (pytest.approx(seconds), known)


def test_pricing_adds_each_operation_at_its_step_and_in_its_loop() -> None:
    turn = Loop(4, (Work(kernels=1.0, operations=((0, 2),)), Exposed(0)))
    steps = (Work(operations=((1, 3),)) + Work(memory=1.0, operations=((2, 1), (1, 1))), turn)
    found = priced(Schedule(steps, operations=(PRODUCT, COPY, BARE), names=("up", "up", "norm")), FOUND)
    assert found.steps == (Work(memory=11.5), Loop(4, (Work(6.0, 0.0, 1.0), Exposed(0))))
    assert found.operations == ()
    assert found.costed == pytest.approx((24 + 10) / (24 + 10.5))
    assert set(found.worked) == {
        Worked("up", True, 8, 24.0),
        Worked("up", False, 4, 10.0),
        Worked("norm", False, 1, 0.5),
    }


def test_operations_without_prices_take_their_seconds_at_full_rates() -> None:
    found = priced(Schedule((Work(operations=((0, 2),)),), operations=(COPY,), names=("",)), Prices())
    assert found.steps == (Work(memory=4.0),) and found.costed == 0


def fused(name: str, layer: int, columns: int, space: str, kind: str = "multiply") -> tuple[str, str]:
    """Return a fusion of a product with another operation, and its computation."""
    left = out = f"bf16[8,{columns}]{{1,0:T(8,128)(2,1){space}}}"
    about = f'metadata={{op_name="layers[{layer}]"}}, backend_config={{"estimated_cycles":"{layer}"}}'
    notes = f"channel_id={layer}, {about}"
    body = f"""f{name}
        %p0.{name} = {left} parameter(0)
        %p1.{name} = bf16[{columns},{columns}]{{1,0:T(8,128)(2,1)}} parameter(1)
        %c.{name} = {out} convolution(%p0.{name}, %p1.{name}), dim_labels=bf_io->bf
        ROOT %m.{name} = {out} {kind}(%c.{name}, %c.{name})"""
    call = f"""%x{name} = {left} parameter(0)
        %y{name} = bf16[{columns},{columns}]{{1,0:T(8,128)(2,1)}} parameter(1)
        %z{name} = {out} fusion(%x{name}, %y{name}), kind=kOutput, calls=%f{name}, {notes}"""
    return call, body


def identities(*found: tuple[str, str]) -> list[tuple[str, str, str]]:
    read = module("\n".join(call for call, _ in found), *(body for _, body in found))
    fingerprints = Fingerprints(read)
    return [fingerprints.of(i, read.entry) for i in read.computations[read.entry] if i.opcode == "fusion"]


def test_fingerprints_ignore_layers_but_not_memory_shape_or_operation() -> None:
    one, other, memory, wider, added = identities(
        fused("a", 1, 128, ""),
        fused("b", 2, 128, ""),
        fused("c", 3, 128, "S(1)"),
        fused("d", 4, 256, ""),
        fused("e", 5, 128, "", "add"),
    )
    assert one == other
    assert memory[0] != one[0] and memory[1:] == one[1:]
    assert added[2] == one[2] and added[0] != one[0] and added[1] != one[1]
    assert not set(wider) & set(one)


def test_buffer_assignment_counts_only_hbm_allocations() -> None:
    found = assignment(
        "BufferAssignment:\n"
        "allocation 0: size 512, thread-local:\n"
        " value: <2 reduce_sum.7 @0> (size=512,offset=0): f32[]\n"
        "allocation 1: size 4096, parameter 3, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:\n"
        "allocation 2: size 64, color 2, parameter 4, shape |s32[]| at ShapeIndex {}:\n"
        "allocation 3: size 16, constant:\n"
        "allocation 4: size 8, output shape is |(f32[])|, maybe-live-out:\n"
        "allocation 5: size 65536, preallocated-temp:\n"
        "allocation 6: size 9999, color 1, preallocated-temp:\n"
    )
    assert (found.arguments, found.temporaries, found.rest) == (4096, 65536, 512 + 16 + 8)


def test_tuple_argument_is_split_into_named_parameters(tmp_path: Path) -> None:
    whole = "(f32[8,128]{1,0:T(8,128)}, f32[128,64]{1,0:T(8,128)})"
    read = module(
        f"""%p = {whole} parameter(0)
            %a = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%p), index=0
            %b = f32[128,64]{{1,0:T(8,128)}} get-tuple-element(%p), index=1
            %t = {whole} tuple(%a, %b)
            %c = f32[8,128]{{1,0:T(8,128)}} get-tuple-element(%t), index=0"""
    )
    (tmp_path / "module_0000.jit.before_optimizations.txt").write_text(
        "HloModule jit\n\nENTRY %main (a: f32[8,128], b: f32[128,64]) -> f32[8,128] {\n"
        "  %a = f32[8,128] parameter(0), metadata={op_name=\"base['w'].value\"}\n"
        "  %b = f32[128,64] parameter(1), metadata={op_name=\"batch['tokens']\"}\n}\n"
    )
    found = untupled(read, tmp_path).computations[read.entry]
    named = {i.name: (i.opcode, i.literal, i.op_name) for i in found}
    assert named["a"] == ("parameter", "0", "base['w'].value")
    assert named["b"] == ("parameter", "1", "batch['tokens']")
    assert named["c"][0] == "get-tuple-element"


def test_schedule_dump_has_sizes_once_all_three_files_have_text(tmp_path: Path) -> None:
    left = tmp_path / "module_0000.jit.after_optimizations"
    Path(f"{left}.txt").write_text(
        "HloModule jit\n\n%f (p: f32[]) -> f32[] {\n  ROOT %p.1 = f32[] parameter(0)\n}\n\n"
        "ENTRY %main (a: f32[]) -> f32[] {\n  %a = f32[] parameter(0)\n"
        "  ROOT %b = f32[] fusion(%a), calls=%f\n}\n"
    )
    Path(f"{left}-buffer-assignment.txt").write_text("allocation 0: size 64, preallocated-temp:\n")
    assert sizes(tmp_path) is None
    Path(f"{left}-live-range.txt").touch()
    assert sizes(tmp_path) is None
    Path(f"{left}-live-range.txt").write_text("HloLiveRange\n")
    assert sizes(tmp_path) == (177, 42, 13)
    text, memory = scheduled(tmp_path)
    assert text.startswith("HloModule")
    assert (memory.temporaries, memory.instructions) == (64, 3)
    Path(f"{left}.txt").unlink()
    with pytest.raises(FileNotFoundError, match="install the libtpu that recipec pins"):
        scheduled(tmp_path)


GIB, MIB = 2**30, 2**20

SUM = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (19.09G) "
    "exceeds available HBM (15.75G)."
)
"""From libtpu 0.0.42.1, for a v5e."""
KERNEL = (
    "RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:\n"
    "Ran out of memory in memory space vmem while allocating on stack for %shard_map.13 = f32[16384,1024]"
    '{1,0:T(8,128)} custom-call(%param.1), custom_call_target="tpu_custom_call". Scoped allocation with size '
    "64.00M and limit 16.00M exceeded scoped vmem limit by 48.00M. It should not be possible to run out of "
    "scoped vmem - \nSee https://openxla.org/xla/errors/error_1001 for more details."
)
"""From the same libtpu, for a kernel whose blocks are too large."""
WINDOW = (
    "RESOURCE_EXHAUSTED: Allocation (size=268435456) would exceed memory (size=134217728) :: #allocation2 "
    "[shape = 'u8[268435456]{0}', space=vmem, size = 0x10000000, scoped, tag = 'input window allocation for "
    "operator input 0.'] :: shard_map.13"
)
"""From the same libtpu, for a kernel without blocks."""
LISTED = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. \
Used 40.10G of 31.25G hbm. Exceeded hbm capacity by 8.85G.

Total hbm usage >= 40.85G:
    reserved        768.00M
    program          38.02G
    arguments         2.08G

Program hbm requirement 38.02G:
    HLO temp         38.02G (99.8% utilization: Unpadded (37.90G) Padded (37.98G))

  Largest program allocations in hbm:

  1. Size: 2.00G
     Operator: op_type="dot_general" op_name="jit(_train)/jvp(BTKGH,BSKH->BTKGS)/dot_general"
     Shape: bf16[1,4096,8,4,4096]{4,3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 2.00G
     XLA label: %fusion.12 = bf16[1,4096,8,4,4096]{4,3,2,1,0:T(8,128)(2,1)} fusion(%a, %b)
     Allocation type: HLO temp
     ==========================

  2. Size: 2.00G
     Operator: op_type="dot_general" op_name="jit(_train)/jvp(BTKGH,BSKH->BTKGS)/dot_general"
     Shape: bf16[1,4096,8,4,4096]{4,3,2,1,0:T(8,128)(2,1)}
     Unpadded size: 2.00G
     XLA label: %fusion.13 = bf16[1,4096,8,4,4096]{4,3,2,1,0:T(8,128)(2,1)} fusion(%c, %d)
     Allocation type: HLO temp
     ==========================

  3. Size: 512.00M
     Operator: op_name="base['layers'][3]['mlp']['gate_proj']['kernel'].value"
     Shape: bf16[65536,4096]{1,0:T(8,128)(2,1)}
     Unpadded size: 512.00M
     Allocation type: HLO temp
     ==========================
"""
"""The message of other libtpu versions, for a program with a memory layout."""


EARLY = (
    "RESOURCE_EXHAUSTED: Compilation failure: Aborting compilation early because it's unlikely to have "
    "enough device memory. Requires 38.62G, has 15.75G available. If more detailed logging is desired, set "
    "--xla_tpu_impure_oom_fast_exit_threshold=-1"
)


@pytest.mark.parametrize(
    ("message", "used", "limit"),
    [
        (SUM, 19.09 * GIB, 15.75 * GIB),
        (SUM.replace("19.09G", "768.00M").replace("15.75G", "1536K"), 768 * MIB, 1.5 * MIB),
        (EARLY, 38.62 * GIB, 15.75 * GIB),
    ],
)
def test_refusal_with_only_the_sum_gives_used_and_limit(message: str, used: float, limit: float) -> None:
    assert parse_refusal(message) == OutOfMemory(used, limit)


def test_refusal_with_a_listing_gives_the_largest_arrays() -> None:
    refused = parse_refusal(LISTED)
    assert refused is not None
    assert (refused.used, refused.limit) == (40.10 * GIB, 31.25 * GIB)
    assert refused.largest == (
        Temporary("BTKGH,BSKH->BTKGS", "bf16[1,4096,8,4,4096]", 2, 4 * GIB),
        Temporary("layers.{}.mlp.gate_proj.kernel", "bf16[65536,4096]", 1, 512 * MIB),
    )


DUMPED = """HloModule jit__train, is_scheduled=true

ENTRY %main.1_spmd (p.0: bf16[1024,512]) -> f32[] {
  %p.0 = bf16[1024,512]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="base['head']['w'].value"}
  %all-gather.1 = bf16[4096,512]{1,0:T(8,128)(2,1)} all-gather(%p.0), dimensions={0}
  ROOT %fusion.1 = f32[]{:T(128)} fusion(%all-gather.1, %p.0), kind=kLoop, calls=%fused
}

"""


def test_largest_arrays_are_read_from_the_dumped_program(tmp_path: Path) -> None:
    (tmp_path / "module_0000.jit__train.cl_1.oom_intermediate_module.txt").write_text(DUMPED)
    (tmp_path / "module_0000.jit__train.cl_1.before_optimizations.txt").write_text("HloModule jit__train")
    refused = parse_refusal(SUM, tmp_path)
    assert refused is not None
    assert refused.largest == (Temporary("head.w / all-gather", "bf16[4096,512]", 1, 4 * MIB),)


def test_refusal_without_a_dumped_program_has_no_arrays(tmp_path: Path) -> None:
    refused = parse_refusal(SUM, tmp_path)
    assert refused is not None and refused.largest == ()


@pytest.mark.parametrize(
    "message", [KERNEL, WINDOW, "INVALID_ARGUMENT: unknown topology", "", "RESOURCE_EXHAUSTED: Out of memory"]
)
def test_other_errors_are_not_parsed_as_hbm_refusals(message: str) -> None:
    assert parse_refusal(message) is None


def test_vmem_overflow_message_gives_kernel_size_and_limit() -> None:
    assert parse_vmem(KERNEL) == ("shard_map.13", "64.00M", "16.00M")
    assert parse_vmem(SUM) is parse_vmem(WINDOW) is None
