"""Tests of serving plans by compiling: the figures of compiled programs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipec.compiler.plan.results import Collective
from recipec.compiler.plan.serve.configuration import cache_reads
from recipec.compiler.plan.serve.hlo import AttentionKernel, attention_kernel, read
from recipec.compiler.plan.serve.results import ServeProgram
from tests.plan.serve_answers import GLOBAL, HLO, LOCAL


@pytest.mark.usefixtures("full_speed")
def test_read_extracts_times_collectives_and_kernels_from_hlo() -> None:
    found = ServeProgram("decode", 64, **read(HLO, "v6e:2x4", 8))
    # The cycles of two fusions at 1.75 GHz. The kernel's time depends on the cache.
    assert found.timeline.products + found.timeline.memory == pytest.approx(4300 / 1.75e9)
    assert found.timeline.kernels == 0
    assert {moved.kind for moved in found.timeline.transfers} == {kind.kind for kind in found.collectives}
    assert set(found.collectives) == {
        Collective("all-gather", ("model",), False, 1, 128 * 4 * 512),  # 64 of a tile's 128
        Collective("all-reduce", ("model",), False, 1, 64 * 5376 * 2),
        Collective("collective-permute", ("model",), False, 1, 64 * 4 * 64 * 2),
    }
    assert found.kernels == ((GLOBAL, 1.0),)
    with pytest.raises(ValueError, match="entry"):
        read("HloModule nothing", "v6e:2x4", 8)


def test_attention_kernel_name_gives_block_size_and_window() -> None:
    assert attention_kernel(LOCAL) == AttentionKernel(True, 16384, 1024)
    assert attention_kernel(GLOBAL) == AttentionKernel(True, 8192, None)
    assert attention_kernel("RPAm-p_16-bq_32_64-bkv_1024_512") == AttentionKernel(False, 1024, None)
    assert attention_kernel("quantized_matmul") is None


def test_window_saves_cache_reads_only_with_small_blocks() -> None:
    sizes = {"sliding_attention": 1024.0, "full_attention": 2048.0}
    default = ServeProgram("decode", 64, kernels=((LOCAL, 50.0), (GLOBAL, 10.0)))
    small = replace(
        default,
        kernels=(("RPAd-p_16-bq_1_1-bkv_1024_1024-sw_1024", 50.0), ("RPAd-p_16-bq_1_1-bkv_1024_1024", 10.0)),
    )
    # 64 sequences of 4,096 tokens: 50 x 1 KiB and 10 x 2 KiB a token. With small blocks,
    # the local layers read only 1,024 tokens.
    assert 64 * cache_reads(default, sizes, 4096) == 64 * 4096 * 70 * 1024
    assert 64 * cache_reads(small, sizes, 4096) == 64 * (1024 * 50 + 4096 * 20) * 1024
