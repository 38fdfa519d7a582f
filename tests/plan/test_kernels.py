"""Tests of the FLOPs, bytes and seconds of custom kernels."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipec.compiler.lowering.hardware import from_name, generations
from recipec.compiler.plan.hlo.parse import Array
from recipec.compiler.plan.kernels import KernelSeconds, Splash, attention, kernels, splash
from tests.plan.hlo_text import module

FORWARD, DQ, DKV = (
    "splash_mha_fwd_segmented_residuals",
    "splash_mha_dq_segmented_no_residuals",
    "splash_mha_dkv_segmented_no_residuals",
)
DEVICES = {"v5p": from_name("v5p-8"), "v6e": from_name("v6e-8"), "tpu7x": from_name("tpu7x-8")}
SECONDS = KernelSeconds(DEVICES["v5p"])


def visited(length: int, block: int, window: int) -> np.ndarray:
    """Return bool[Q, K]: whether a block of queries attends to a block of keys."""
    query, key = np.arange(length)[:, None], np.arange(length)[None, :]
    seen = (key <= query) & (key > query - window)
    count = length // block
    return seen.reshape(count, block, count, block).any(axis=(1, 3))


def of(name: str, operands: list[Array], results: list[Array] | None = None) -> Splash:
    found = splash(name, operands, results or [])
    assert found is not None
    return found


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize(
    "length, block, window", [(3072, 512, 1024), (3072, 512, 3072), (1280, 256, 512), (384, 128, 128)]
)
def test_splash_flops_count_whole_visited_blocks(
    length: int, block: int, window: int, batch: tuple[int, ...]
) -> None:
    heads, size = 8, 64
    blocks = visited(length, block, window)
    rows, most = len(blocks), int(blocks.sum(1).max())
    queries = Array("bf16", (*batch, heads, length, size), 0)
    keys = Array("bf16", (*batch, 2, length, size), 0)
    product = 2 * int(blocks.sum()) * block * block * size * heads * int(np.prod(batch))
    table, turned = Array("s8", (1, rows, most), 0), Array("s8", (1, most, rows), 0)
    assert of(FORWARD, [table, table, queries, keys, keys]).flops == 2 * product
    assert of(DQ, [table, table, queries, keys, keys]).flops == 3 * product
    assert of(DKV, [turned, turned, queries, keys, keys]).flops == 4 * product
    # Computes dQ by blocks of keys together with dK and dV: the whole backward pass.
    parts = Array("bf16", (*batch, rows, heads, length, size), 0)
    whole = of(DKV, [turned, turned, queries, keys, keys], [parts, keys, keys])
    assert whole == replace(of(DKV, [turned, turned, queries, keys, keys]), phase="bwd")
    assert whole.flops == 5 * product


def test_kernels_are_counted_outside_and_inside_loops() -> None:
    given = """%next = s8[1,6,3]{2,1,0:T(8,128)(4,1)} constant({...})
        %q = bf16[8,3072,256]{2,1,0:T(8,128)(2,1)} parameter(0)
        %k = bf16[4,3072,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
        %v = bf16[4,3072,256]{2,1,0:T(8,128)(2,1)} parameter(2)
        """
    splash_forward = """%splash_mha_fwd_segmented_residuals.12 = (bf16[8,3072,256]{2,1,0:T(8,128)(2,1)}, \
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
    body = "body\n" + given + splash_forward
    found = kernels(module(given + splash_forward + other + loop, body), SECONDS)
    assert [(kernel.name, kernel.count) for kernel in found] == [
        ("other", 1),
        ("splash_mha_fwd_segmented_residuals", 6),
    ]
    unknown, known = found
    values = 4 * 3072 * 256 * 2
    assert (unknown.flops, unknown.bytes) == (0.0, 2 * values)
    assert unknown.seconds == pytest.approx(2 * values / 2765e9)
    # 1 + 2 + 3 + 3 + 3 + 3 blocks; k is in VMEM.
    assert known.flops == 6 * 2 * 2 * 8 * 15 * 512 * 512 * 256
    table, residuals = 8 * 128, 8 * 3072 * 128 * 4
    assert known.bytes == 6 * (table + 2 * values + values + 2 * values + residuals)
    law = attention("v5p").seconds(Splash("fwd", 8, 3072, 256, 15, 512 * 512), 459e12)
    assert known.seconds == pytest.approx(6 * law)


def test_memory_bound_kernel_takes_its_bytes_over_the_bandwidth() -> None:
    """Price one token whose gigabyte-sized table decides the time."""
    text = """%next = s8[1,1,1]{2,1,0:T(8,128)(4,1)} constant({...})
        %q = bf16[1,128,128]{2,1,0:T(8,128)(2,1)} parameter(0)
        %k = bf16[4096,131072]{1,0:T(8,128)(2,1)} parameter(1)
        %splash_mqa_dq_no_residuals.1 = bf16[1,128,128]{2,1,0:T(8,128)(2,1)} custom-call(%next, %q, %k), \
custom_call_target="tpu_custom_call\""""
    (kernel,) = kernels(module(text), SECONDS)
    assert kernel.flops == 3 * 2 * 128**3
    assert kernel.bytes == 8 * 128 + 2 * 128 * 128 * 2 + 2**30
    assert kernel.seconds == pytest.approx(kernel.bytes / 2765e9)


@pytest.mark.parametrize("name", ["paged_attention", "splash_mha_fused", "splash_mha_dkvx"])
def test_unknown_kernels_have_no_flops(name: str) -> None:
    table, queries = Array("s8", (1, 6, 6), 0), Array("bf16", (8, 3072, 128), 0)
    assert splash(name, [table, queries], []) is None
    assert splash(FORWARD, [queries, queries], []) is None
    assert SECONDS.of(name, [table, queries], [queries]).flops == 0.0


def test_expert_products_cost_one_weight_for_each_row() -> None:
    rows, weights = Array("bf16", (4096, 2048), 2**24), Array("bf16", (8, 2048, 1024), 2**25)
    result = Array("bf16", (4096, 1024), 2**23)
    cost = SECONDS.of("ragged-dot-none.3", [rows, weights], [result])
    assert cost.flops == 2 * 4096 * 2048 * 1024 and cost.bytes == 2**24 + 2**25 + 2**23


def published() -> Iterator[tuple[str, str, Splash, float]]:
    """Yield the generation, pass, kernel and seconds of each published timing.

    The kernel skips blocks of keys that begin after a block's last query.
    """
    path = Path(__file__).parents[2] / "scripts" / "published" / "attention.csv"
    with path.open(encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            heads, length, size, q, k = (
                int(row[name]) for name in ("rows", "length", "head_size", "block_q", "block_kv")
            )
            blocks = sum(math.ceil((block + 1) * q / k) for block in range(length // q))
            one = Splash(row["pass"], heads, length, size, blocks, q * k)
            yield row["generation"], row["pass"], one, float(row["ms"]) / 1e3


@pytest.mark.parametrize(("phase", "count", "rms", "most"), [("fwd", 65, 0.08, 0.2), ("bwd", 29, 0.12, 0.3)])
def test_attention_time_model_fits_the_published_timings(
    phase: str, count: int, rms: float, most: float
) -> None:
    errors = [
        attention(generation).seconds(one, DEVICES[generation].peak_flops_per_device) / seconds - 1
        for generation, of_pass, one, seconds in published()
        if of_pass == phase
    ]
    assert len(errors) == count
    assert math.sqrt(sum(error**2 for error in errors) / count) <= rms
    assert max(map(abs, errors)) <= most


@pytest.mark.parametrize("phase", ["fwd", "dq", "dkv", "bwd"])
@pytest.mark.parametrize("generation", list(generations()))
def test_larger_blocks_and_smaller_windows_cost_less(generation: str, phase: str) -> None:
    law, peak = attention(generation), 459e12

    def seconds(block: int, window: int = 2048) -> float:
        blocks = visited(2048, block, window)
        return law.seconds(Splash(phase, 8, 2048, 128, int(blocks.sum()), block * block), peak)

    assert seconds(128) > seconds(256) > seconds(512)
    assert seconds(256) > seconds(256, 1024) > seconds(256, 512)
    twice = law.seconds(Splash(phase, 16, 2048, 128, 10, 512 * 512), peak)
    assert twice == pytest.approx(2 * seconds(512))


def test_split_backward_kernels_take_seven_fifths_of_the_fused_kernel() -> None:
    law = attention("v5p")

    def seconds(phase: str) -> float:
        return law.seconds(Splash(phase, 8, 16384, 256, 136, 1024 * 1024), 459e12)

    assert seconds("bwd") < seconds("dq") + seconds("dkv")
    assert (seconds("dq") + seconds("dkv")) / seconds("bwd") == pytest.approx(7 / 5, rel=0.02)


@pytest.mark.parametrize(("generation", "like"), [("v4", "v5p"), ("v5e", "v6e")])
def test_untimed_generation_scales_a_similar_generation_by_clock(generation: str, like: str) -> None:
    clocks = [generations()[name]["compiler"]["cycles_ghz"] for name in (like, generation)]
    slower = clocks[0] / clocks[1]
    assert slower > 1
    # The vector unit limits these kernels, and the peak does not.
    one = Splash("fwd", 8, 4096, 64, 10, 1024 * 1024)
    times = [attention(name).seconds(one, 1e18) for name in (generation, like)]
    assert times[0] == pytest.approx(slower * times[1])
