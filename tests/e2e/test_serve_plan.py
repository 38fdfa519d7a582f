"""Tests of tpu-inference's own serving step, compiled for v6e on a machine without a TPU.

The tests install the serving environment in build/ if it is missing (7 GB, some minutes).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lower import lower
from recipec.compiler.plan.server_step import environment as serve_environment
from recipec.compiler.plan.server_step.hlo import attention_kernel
from recipec.compiler.plan.server_step.server_plan import COMPILED_SERVING, CompiledServing
from recipec.compiler.plan.server_step.server_search import plan_serve
from recipec.spec.load import load

pytestmark = pytest.mark.nightly

SMALL = {
    "model_type": "gemma4_text",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "layer_types": [*["sliding_attention"] * 5, "full_attention"],
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "global_head_dim": 256,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 512,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 30.0,
}

RECIPE = """\
recipe: 1
name: small
model: {id: ./model}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 8}
data: {train: [{path: train.jsonl}], max_length: 512}
serve:
  accelerator: v6e-8
  tensor_parallel_size: 8
  max_model_len: 4096
  max_num_seqs: 16
  max_num_batched_tokens: 256
  kv_cache_dtype: fp8
benchmark: {input_lengths: [512], output_length: 128, request_rates: [inf], prompts: 20}
"""


@pytest.fixture(autouse=True)
def environment(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the serving environment in build/, with an empty cache."""
    monkeypatch.setenv(serve_environment.VARIABLE, str(root / "build" / "serve-0.32.0"))
    monkeypatch.setenv("RECIPEC_CACHE", str(tmp_path / "cache"))


def planned(recipe: Path, *sets: str) -> tuple[str, CompiledServing]:
    found = lower(load(recipe, sets))
    assert found.program is not None, [d.message for d in found.diagnostics]
    _, text, data = plan_serve(found.program, say=print)
    print(text)
    return text, COMPILED_SERVING.validate_python(data)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    config: dict[str, Any] = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": SMALL,
    }
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "train.jsonl").write_text('{"messages": []}\n')
    recipe = tmp_path / "small.yaml"
    recipe.write_text(RECIPE)
    return recipe


def test_serving_step_compiles_with_the_requested_block_sizes(small: Path) -> None:
    blocks = "RPA_V3_DECODE_BLOCK_SIZES: '1,1024,1,1024'"
    text, plan = planned(
        small,
        f"serve.env={{{blocks}}}",
        "serve.extra_args={num_gpu_blocks_override: 4096, limit_mm_per_prompt: {video: 0}}",
    )
    assert plan.fits and plan.compiled_layers == (6,)
    # A device has one head in each layer: the global layer's 4 heads are copied to 8. A key and a value in
    # fp8 take four rows, of 128 numbers in the 5 local layers and of 256 in the global layer.
    assert plan.cache == plan.cache_tokens * (5 * 4 * 128 + 4 * 256)
    # The embedding and every projection are sharded over 8 devices.
    local = 512 * (16 * 128 + 2 * 8 * 128) + 16 * 128 * 512
    whole = 512 * (16 * 256 + 4 * 256) + 16 * 256 * 512
    feed_forward = 3 * 512 * 1024
    split = (4096 * 512 + 5 * local + whole + 6 * feed_forward) * 2 / 8
    assert plan.weights == pytest.approx(split, rel=0.01)
    decode = plan.programs[0]
    kernels = {attention_kernel(name): count for name, count in decode.kernels}
    read = {(k.block, k.window): n for k, n in kernels.items() if k and k.decode}
    assert read == {(1024, 512): 5, (1024, None): 1}
    reduced = {c.kind: c.count for c in decode.collectives}["all-reduce"]
    assert reduced >= 12  # two in each layer
    assert decode.arguments == pytest.approx(plan.weights + plan.cache, rel=0.01)
    assert decode.cycles > 0 and "untested on hardware" in text


def test_compiler_refuses_a_kv_cache_larger_than_memory(small: Path) -> None:
    text, plan = planned(
        small, "serve.extra_args={num_gpu_blocks_override: 2000000, limit_mm_per_prompt: {video: 0}}"
    )
    assert not plan.fits
    assert plan.refusal is not None and "hbm" in plan.refusal.lower()
    assert "It does not fit; the compiler says:" in text


def test_gemma4_31b_serving_plan_matches_the_published_run(root: Path) -> None:
    # With the recipe's 16,384 tokens, the decode kernel's block would be as large. That compiles four times
    # longer, and changes neither weights nor cycles.
    _, plan = planned(root / "recipes" / "gemma4-31b-v5p8.yaml", "serve.max_model_len=4608")
    assert plan.compiled_layers == (6, 12) and plan.fits
    assert plan.weights == pytest.approx(7.75e9, rel=0.02)
    # vLLM's share of 0.92 of 31.25 GiB, without the weights.
    assert plan.cache == pytest.approx(0.92 * 31.25 * 2**30 - plan.weights, rel=0.01)
    # Three in each of ten global layers, whose keys are sharded over the head size; two all-reduces a layer.
    counts = {c.kind: c.count for c in plan.programs[0].collectives}
    assert counts["all-gather"] == 30 and 120 <= counts["all-reduce"] <= 140
    # Within the published figures and this estimate's known error factor.
    assert 0.006 < plan.decode_alone < 0.024 and 0.0135 < plan.decode_full < 0.05
    assert len(plan.published) == 4
