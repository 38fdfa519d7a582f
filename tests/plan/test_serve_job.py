"""Tests of serving plans by compiling: from programs to jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.serve.compile import config_of, depths, job, padded, replica_topology
from recipec.compiler.plan.serve.results import JOB, Bucket
from tests.plan.serve_answers import RECIPE, lowered


def test_serve_job_has_the_topology_and_buckets_of_the_recipe(example: Program) -> None:
    made = job(example, (6, 12))
    assert (made.topology, made.tensor_parallel, made.model_layers) == ("v6e:2x4", 8, 60)
    assert made.buckets == (Bucket("decode", 64), Bucket("prefill", 1024))
    assert made.hbm_bytes == 31.25 * 2**30
    assert JOB.validate_json(JOB.dump_json(made)) == made


def test_config_of_a_catalog_gemma_4_is_the_text_model(example: Program) -> None:
    config = config_of(example)
    assert config["architectures"] == ["Gemma4ForCausalLM"]
    assert len(config["text_config"]["layer_types"]) == 60
    assert config["text_config"]["max_position_embeddings"] >= 16384


def test_flags_and_environment_reach_the_job(tmp_path: Path) -> None:
    flags = "serve.extra_args={gpu_memory_utilization: 0.8, block-size: 32, limit_mm_per_prompt: {video: 0}}"
    program = lowered(tmp_path, RECIPE, flags, "serve.env={A: b}", "serve.max_num_batched_tokens=512")
    made = job(program, (6,))
    assert (made.memory_share, made.page_tokens, made.environment) == (0.8, 32, (("A", "b"),))
    assert made.buckets[1].tokens == 512


def test_decode_block_sizes_reach_the_job_by_key_or_environment(tmp_path: Path) -> None:
    sizes = ("RPA_V3_DECODE_BLOCK_SIZES", "1,1024,1,1024")
    key = lowered(tmp_path, RECIPE, "serve.decode_block_sizes=[1, 1024, 1, 1024]", "serve.env={A: b}")
    assert job(key, (6,)).environment == (("A", "b"), sizes)
    variable = lowered(tmp_path, RECIPE, f"serve.env={{{sizes[0]}: '{sizes[1]}'}}")
    assert job(variable, (6,)).environment == (sizes,)


def test_depths_are_whole_repeats_of_the_layer_pattern(example: Program, tmp_path: Path) -> None:
    assert depths(example, exact=False) == [(6, 12)]
    assert depths(example, exact=True) == [(60,), (6, 12)]
    shared = lowered(tmp_path, RECIPE.replace("31B", "E2B"), "serve.tensor_parallel_size=1")
    assert depths(shared, exact=False) == [(35,)]


@pytest.mark.parametrize(("tokens", "bucket"), [(1, 16), (64, 64), (65, 128), (1000, 1024)])
def test_step_tokens_are_padded_to_a_server_bucket(tokens: int, bucket: int) -> None:
    assert padded(tokens) == bucket


def test_replica_gets_the_smallest_topology_with_enough_chips() -> None:
    assert [replica_topology("v6e", n) for n in (1, 2, 4, 8)] == ["v6e:2x2", "v6e:2x2", "v6e:2x2", "v6e:2x4"]
    assert replica_topology("tpu7x", 16) == "tpu7x:2x2x2"


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (("serve.quantization=fp8",), "only with bfloat16 weights"),
        (("model.id=google/gemma-3-27b-it",), "vLLM's PyTorch model"),
        (
            ("serve.accelerator=v5p-8", "serve.tensor_parallel_size=4", "serve.kv_cache_dtype=auto"),
            "not for v5p",
        ),
        (("serve.env={MODEL_IMPL_TYPE: vllm}",), "vLLM's PyTorch model"),
    ],
)
def test_serving_recipes_that_cannot_be_compiled_are_refused(
    tmp_path: Path, sets: tuple[str, ...], why: str
) -> None:
    with pytest.raises(ArtifactError, match=why):
        job(lowered(tmp_path, RECIPE, *sets), (6,))
