"""Tests of how libtpu's message about a program that does not fit is parsed."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.plan.hlo.assigned import parse_refusal, parse_vmem
from recipec.compiler.plan.results import OutOfMemory, Temporary

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
