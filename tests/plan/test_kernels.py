"""FLOPs, bytes and seconds of custom kernels."""

from __future__ import annotations

import numpy as np
import pytest

from recipec.compiler.plan.hlo.parse import Array
from recipec.compiler.plan.kernels import EFFICIENCY, kernels, splash_flops
from tests.plan.hlo_text import module

FORWARD, DQ, DKV = (
    "splash_mha_fwd_segmented_residuals",
    "splash_mha_dq_segmented_no_residuals",
    "splash_mha_dkv_segmented_no_residuals",
)


def visited(length: int, block: int, window: int) -> np.ndarray:
    """Whether a pair of blocks of queries and keys has anything to attend to: bool[Q, K]."""
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = (key <= query) & (key > query - window)
    count = length // block
    return seen.reshape(count, block, count, block).any(axis=(1, 3))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(
    "length, block, window", [(3072, 512, 1024), (3072, 512, 3072), (1280, 256, 512), (384, 128, 128)]
)
def test_whole_blocks_are_counted(length: int, block: int, window: int, batch: tuple[int, ...]) -> None:
    heads, size = 8, 64
    blocks = visited(length, block, window)
    rows, most = len(blocks), int(blocks.sum(1).max())
    queries = Array("bf16", (*batch, heads, length, size), 0)
    keys = Array("bf16", (*batch, 2, length, size), 0)
    product = 2 * int(blocks.sum()) * block * block * size * heads * int(np.prod(batch))
    table, turned = Array("s8", (1, rows, most), 0), Array("s8", (1, most, rows), 0)
    assert splash_flops(FORWARD, [table, table, queries, keys, keys]) == 2 * product
    assert splash_flops(DQ, [table, table, queries, keys, keys]) == 3 * product
    assert splash_flops(DKV, [turned, turned, queries, keys, keys]) == 4 * product


def test_kernels_are_found_and_counted_in_loops_too() -> None:
    given = """%next = s8[1,6,3]{2,1,0:T(8,128)(4,1)} constant({...})
        %q = bf16[8,3072,256]{2,1,0:T(8,128)(2,1)} parameter(0)
        %k = bf16[4,3072,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
        %v = bf16[4,3072,256]{2,1,0:T(8,128)(2,1)} parameter(2)
        """
    attention = """%splash_mha_fwd_segmented_residuals.12 = (bf16[8,3072,256]{2,1,0:T(8,128)(2,1)}, \
f32[8,3072,128]{2,1,0:T(8,128)}) custom-call(%next, %q, %k, %v), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
}}
        """
    other = """%other.3.clone = bf16[4,3072,256]{2,1,0:T(8,128)(2,1)} custom-call(%v), \
custom_call_target="tpu_custom_call"
        %memory = bf16[4,3072,256]{2,1,0:T(8,128)(2,1)} custom-call(), custom_call_target="AllocateBuffer"
        """
    loop = """%w = bf16[8,3072,256]{2,1,0:T(8,128)(2,1)} while(%q), condition=%c, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
        """
    body = "body\n" + given + attention
    found = kernels(module(given + attention + other + loop, body), 100e12, 1e12)
    assert [(kernel.name, kernel.count) for kernel in found] == [
        ("other", 1),
        ("splash_mha_fwd_segmented_residuals", 6),
    ]
    unknown, splash = found
    values = 4 * 3072 * 256 * 2
    assert (unknown.flops, unknown.bytes) == (0.0, 2 * values)
    assert unknown.seconds == pytest.approx(2 * values / 1e12)
    # 1 + 2 + 3 + 3 + 3 + 3 blocks; k lies in VMEM.
    assert splash.flops == 6 * 2 * 2 * 8 * 15 * 512 * 512 * 256
    table, residuals = 8 * 128, 8 * 3072 * 128 * 4
    assert splash.bytes == 6 * (table + 2 * values + values + 2 * values + residuals)
    assert splash.seconds == pytest.approx(splash.flops / (100e12 * EFFICIENCY))


def test_bandwidth_bounds_a_kernel() -> None:
    text = """%next = s8[1,1,1]{2,1,0:T(8,128)(4,1)} constant({...})
        %q = bf16[1,128,128]{2,1,0:T(8,128)(2,1)} parameter(0)
        %splash_mqa_dq_no_residuals.1 = bf16[1,128,128]{2,1,0:T(8,128)(2,1)} custom-call(%next, %q), \
custom_call_target="tpu_custom_call\""""
    (kernel,) = kernels(module(text), 1e15, 1e9)
    assert kernel.flops == 3 * 2 * 128**3
    assert kernel.seconds == pytest.approx((8 * 128 + 2 * 128 * 128 * 2) / 1e9)


@pytest.mark.parametrize("name", ["paged_attention", "splash_mha_fused", "splash_mha_dkvx"])
def test_other_kernels_have_no_flops(name: str) -> None:
    table, queries = Array("s8", (1, 6, 6), 0), Array("bf16", (8, 3072, 128), 0)
    assert splash_flops(name, [table, queries]) == 0.0
    assert splash_flops(FORWARD, [queries, queries]) == 0.0
