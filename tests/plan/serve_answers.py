"""A serving recipe, and made-up answers of the serving worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from recipec.compiler.lowering.program import Program
from recipec.compiler.pages.text import WIDTH, write
from recipec.compiler.plan.results import Collective, Moved, Timeline
from recipec.compiler.plan.server_step.server_plan import ServeAnswer, ServeDepth, ServeJob, ServeProgram
from recipec.compiler.plan.server_step.server_search import plan_serve
from tests.plan import plans

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 64}
data: {train: [gs://bucket/train.jsonl], max_length: 512}
serve: {accelerator: v6e-8, tensor_parallel_size: 8, kv_cache_dtype: fp8}
benchmark: {input_lengths: [512, 4096], output_length: 512, request_rates: [1, inf]}
"""

HLO = """\
HloModule jit_run_model_impl, is_scheduled=true, entry_computation_layout={(bf16[64,5376]{1,0})->bf16[64]{0}}

%add.2.clone (x: bf16[], y: bf16[]) -> bf16[] {
  %x = bf16[] parameter(0)
  ROOT %add.1 = bf16[] add(%x, %y), backend_config={"window_config":{"estimated_cycles":"777"}}
}

%f.95 (param_0.1: bf16[64,5376]) -> bf16[64,5376] {
  ROOT %param_0.1 = bf16[64,5376]{1,0:T(8,128)(2,1)} parameter(0)
}

ENTRY %main.50_spmd (param.57: bf16[64,5376]) -> bf16[64] {
  %param.57 = bf16[64,5376]{1,0:T(8,128)(2,1)} parameter(0), sharding={devices=[8,1]<=[8]}
  %fusion.1 = bf16[64,5376]{1,0:T(8,128)(2,1)S(1)} fusion(%param.57), kind=kLoop, calls=%f.95, \
backend_config={"window_config":{"estimated_cycles":"4260","iteration_bounds":["1"]}}
  %all-reduce.1 = bf16[64,5376]{1,0:T(8,128)(2,1)S(1)} all-reduce(%fusion.1), channel_id=3, \
replica_groups=mesh['data'=1,'model'=8] {'model'}, to_apply=%add.2.clone
  %all-gather.2 = f8e4m3fn[64,4,512]{0,2,1:T(8,128)(4,1)S(1)} all-gather(%all-reduce.1), dimensions={2}
  %collective-permute-start = (bf16[64,4,64]{0,2,1}, bf16[64,4,64]{0,2,1}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%fusion.1), channel_id=15, source_target_pairs={{0,1},{1,2}}
  %collective-permute-done = bf16[64,4,64]{0,2,1} collective-permute-done(%collective-permute-start)
  %RPAd-p_16-bq_1_1-bkv_8192_8192.1 = (bf16[1,64,2,2,512]{4,3,2,1,0}, f8e4m3fn[40,16,1,4,512]{4,3,2,1,0}) \
custom-call(%all-gather.2), custom_call_target="tpu_custom_call", backend_config={"body":""}
  %custom-call.7 = bf16[64]{0} custom-call(%fusion.1), custom_call_target="ConcatBitcast"
  ROOT %fusion.2 = bf16[64]{0} fusion(%custom-call.7), kind=kOutput, \
backend_config={"window_config":{"estimated_cycles":"40"}}
}
"""
"""A part of Gemma 4 31B's decode step on v6e-8, as libtpu 0.0.48 wrote it."""

CLOCK = 1.75e9
LOCAL, GLOBAL = "RPAd-p_16-bq_1_1-bkv_16384_16384-sw_1024", "RPAd-p_16-bq_1_1-bkv_8192_8192"


def lowered(folder: Path, recipe: str, *sets: str) -> Program:
    path = folder / "recipe.yaml"
    path.write_text(recipe)
    return plans.lowered(path, *sets)


def program_of(kind: str, tokens: int, layers: int, pages: int) -> ServeProgram:
    """Return rounded figures of Gemma 4 31B at TP 8, linear in the number of layers."""
    tens = layers / 6
    return ServeProgram(
        kind,
        tokens,
        arguments=0.352e9 + tens * (0.7324e9 + pages * 114688),
        temporaries=tens * (10.5e6 if kind == "decode" else 34e6),
        code=tens * 24e6,
        outputs=0.7e6,
        timeline=Timeline(
            memory=(60_000 + tens * (1_131_000 if kind == "decode" else 4_800_000)) / CLOCK,
            transfers=(Moved("all-reduce", "", ("model",), False, 13 * tens, 1e6, 2e-4 * tens, 2e-4 * tens),),
        ),
        collectives=(
            Collective("all-gather", ("model",), False, round(3 * tens), 4e5 * tens),
            Collective(
                "all-reduce", ("model",), False, round(1 + 13 * tens), tokens * 10752 * (1 + 13 * tens)
            ),
        ),
        kernels=((LOCAL, 5 * tens), (GLOBAL, tens)),
        seconds=10.0,
    )


def answered(made: ServeJob, say: Any = None) -> ServeAnswer:
    """Answer a job as the worker would."""
    pages = made.pages or 19636
    return ServeAnswer(
        page_tokens=16,
        pages=pages,
        token_bytes={"sliding_attention": 1024.0, "full_attention": 2048.0},
        depths=tuple(
            ServeDepth(
                layers,
                0.3523e9 + layers / 6 * 0.7324e9,
                layers / 6 * 114688,
                tuple(program_of(bucket.kind, bucket.tokens, layers, pages) for bucket in made.buckets),
            )
            for layers in made.layers
        ),
        head=ServeProgram("head", 64, arguments=0.35e9, timeline=Timeline(memory=468_000 / CLOCK)),
        peak_rss=3.5e9,
        seconds=100.0,
    )


def planned_texts(program: Program, **options: Any) -> tuple[str, dict[str, Any]]:
    """Plan a server, and return the printed text and the values."""
    _, shown, data = plan_serve(program, **options)
    return write(shown, WIDTH), json.loads(json.dumps(data))
