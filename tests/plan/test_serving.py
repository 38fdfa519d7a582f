"""Tests of serving plans by formulas, against hand-computed numbers and published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lower import lower
from recipec.compiler.pages.text import write
from recipec.compiler.roofline.server_estimate import plan_serving, too_small
from recipec.compiler.roofline.server_results import SERVING_PLAN, ServingPlan, StepBounds
from recipec.compiler.roofline.server_text import document
from recipec.compiler.vllm.device_memory import memory_share
from recipec.spec.load import load
from tests.plan.plans import lowered

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 64}
data: {train: [gs://bucket/train.jsonl], max_length: 512}
serve:
  accelerator: v6e-8
  tensor_parallel_size: 8
  kv_cache_dtype: fp8
  extra_args: {gpu_memory_utilization: 0.9}
"""

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1001,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "max_position_embeddings": 16384,
}
LLAMA = {**DENSE, "architectures": ["LlamaForCausalLM"], "model_type": "llama"}

GOLDEN = Path(__file__).parent / "golden"

Plan = Callable[..., ServingPlan]


@pytest.fixture
def planned(tmp_path: Path) -> Plan:
    """Return a function that plans the recipe with `--set` arguments, and optionally with a config.json."""

    def run(*sets: str, config: dict[str, object] | None = None) -> ServingPlan:
        path = tmp_path / "recipe.yaml"
        path.write_text(RECIPE)
        if config is not None:
            (tmp_path / "config.json").write_text(json.dumps(config))
            sets = ("model.id=.", *sets)
        return plan_serving(lowered(path, *sets))

    return run


def weights_of(plan: ServingPlan) -> dict[tuple[str, str], float]:
    return {(line.name, line.placed): line.bytes for line in plan.weights}


def test_small_dense_model_weights_and_cache_match_hand_counts(planned: Plan) -> None:
    plan = planned("serve.tensor_parallel_size=2", "serve.data_parallel_size=4", config=LLAMA)
    split = "split over 2"
    assert weights_of(plan) == {
        ("embeddings", split): 501 * 256 * 2,  # 1,001 rows padded to 1,002
        ("attention", split): 2 * (256 * 8 * 128 + 8 * 128 * 256),
        ("keys and values", split): 2 * 2 * 256 * 4 * 128,
        ("MLP", split): 2 * 3 * 256 * 512,
        ("norms and small projections", "whole on each"): (2 * 2 + 1) * 256 * 2,
        ("output head", split): 256 * 1001,
    }
    assert plan.weight_bytes == sum(weights_of(plan).values())
    (cache,) = plan.caches
    assert (cache.name, cache.layers, cache.device_heads, cache.window) == ("all", 2, 2, None)
    assert cache.bytes_per_token == cache.unpadded_bytes_per_token == 2 * (2 * 2 * 128)
    assert plan.cache_bytes == pytest.approx(31.25 * 2**30 * 0.9 - plan.weight_bytes)
    assert plan.tokens_fit == int(plan.cache_bytes // 1024)
    assert plan.sequences_fit == int(plan.cache_bytes // (1024 * 16384))


def test_decode_step_bytes_flops_and_times_match_hand_counts(planned: Plan) -> None:
    plan = planned("serve.tensor_parallel_size=2", "serve.data_parallel_size=4", config=LLAMA)
    step = next(step for step in plan.decode if step.sequences == 64 and step.tokens == 4096)
    read = plan.weight_bytes - 501 * 256 * 2  # the embedding is only a lookup
    cache = 64 * 4096 * 1024
    assert step.weight_bytes == read and step.cache_bytes == step.whole_cache_bytes == cache
    linear = 2 * (2 * 256 * 8 * 128 + 2 * 256 * 4 * 128 + 3 * 256 * 512)
    flops = 64 * (2 * (linear + 256 * 1001) + 2 * 4 * 8 * 128 * 4096) / 2
    assert step.flops == pytest.approx(flops)
    # Two layers, each with two all-reduces. In a ring of two, each device sends half of the array
    # twice, and receives half of it twice.
    assert step.all_reduce_bytes == 2 * 2 * 4 * 0.5 * 64 * 256 * 2
    assert step.memory_seconds == pytest.approx((read + cache) / 1638e9)
    assert step.compute_seconds == pytest.approx(flops / 918e12)
    assert step.all_reduce_seconds == pytest.approx(step.all_reduce_bytes / 800e9)
    assert step.bound_seconds == step.memory_seconds
    assert step.estimate_seconds == pytest.approx(step.memory_seconds + step.all_reduce_seconds)


def test_prefill_reads_the_weights_once_per_step_of_a_long_prompt(planned: Plan) -> None:
    plan = planned(
        "serve.tensor_parallel_size=1",
        "serve.data_parallel_size=8",
        "serve.max_num_batched_tokens=2048",
        config=LLAMA,
    )
    step = next(step for step in plan.prefill if step.tokens == 4096)
    read = plan.weight_bytes - 1001 * 256 * 2
    assert step.weight_bytes == 2 * read
    linear = 2 * (2 * 256 * 8 * 128 + 2 * 256 * 4 * 128 + 3 * 256 * 512)
    pairs = 4096 * 4097 / 2
    assert step.flops == pytest.approx(4096 * 2 * linear + 2 * 256 * 1001 + 2 * 4 * 8 * 128 * pairs)
    assert step.all_reduce_bytes == 0 and step.bound_seconds == max(step.memory_seconds, step.compute_seconds)


def test_gated_delta_nets_store_a_state_per_sequence_and_no_keys(planned: Plan) -> None:
    """Plan three delta-net layers of four.

    They have 6 value heads of 16 x 32 in float32, and keep three tokens before a convolution.
    """
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
    sizes = {"linear_key_head_dim": 16, "linear_value_head_dim": 32}
    config = {**DENSE, "model_type": "qwen3_5_text", "num_hidden_layers": 4, **linear, **sizes}
    plan = planned("serve.tensor_parallel_size=2", "serve.data_parallel_size=4", config=config)
    full, states = plan.caches
    assert (full.name, full.layers, full.bytes_per_sequence) == ("global", 1, 0)
    assert (states.name, states.layers, states.device_heads, states.bytes_per_token) == ("linear", 3, 3, 0)
    of_each = 3 * 16 * 32 * 4 + (2 * 2 * 16 + 6 * 32) / 2 * 3 * 2
    assert states.bytes_per_sequence == 3 * of_each
    # vLLM caches prefixes, so that eight states are set aside for each of 64 requests, and one for padding.
    assert plan.state_bytes == (64 * 8 + 1) * 3 * of_each
    assert plan.cache_bytes == 31.25 * 2**30 * 0.9 - plan.weight_bytes - plan.state_bytes
    assert plan.sequences_fit == int(plan.cache_bytes // (16384 * full.bytes_per_token))
    one = next(step for step in plan.decode if step.sequences == 1 and step.tokens == 4096)
    assert one.cache_bytes == 4096 * full.bytes_per_token + 2 * 3 * of_each
    assert f"the states of linear layers: {3 * of_each / 1e6:.1f} MB a sequence" in write(document(plan))


def test_pool_of_states_shrinks_to_the_requests_that_fit(planned: Plan) -> None:
    """Plan Qwen3.5 9B on a small machine, with and without cached prefixes."""
    sets = ("model.id=Qwen/Qwen3.5-9B", "serve.accelerator=v6e-1", "serve.tensor_parallel_size=1")
    drafting = "serve.extra_args={speculative_config: {num_speculative_tokens: 3}}"
    changes = ((), ("serve.prefix_caching=false",), (drafting,))
    cached, without, drafted = (planned(*sets, *change) for change in changes)
    states = next(one.bytes_per_sequence for one in cached.caches if one.bytes_per_sequence)
    assert without.state_bytes == (64 + 1) * states and drafted.state_bytes == (64 * 4 + 1) * states
    left = cached.state_bytes + cached.cache_bytes
    longest = sum(one.bytes_per_token for one in cached.caches) * 16384
    assert left - (64 * 8 + 1) * states < 64 * longest
    requests = int(left // (longest + 8 * states))
    assert cached.state_bytes == (max(64 * 2, requests * 8) + 1) * states
    assert "pool of states" in write(document(cached)) and "pool of states" not in write(document(planned()))


def test_latent_attention_cache_is_whole_on_each_device(planned: Plan) -> None:
    """Plan two layers, one with experts.

    160 compressed features are padded to 256, and 16 rotary features to 128.
    """
    latent = {"q_lora_rank": 96, "kv_lora_rank": 160, "qk_nope_head_dim": 48, "qk_rope_head_dim": 16}
    mixed = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_group": 1}
    sizes = {"v_head_dim": 32, "num_key_value_heads": 8, "topk_group": 1, "first_k_dense_replace": 1}
    kind = {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"]}
    config = {**DENSE, **kind, **latent, **mixed, **sizes}
    sets = ("serve.tensor_parallel_size=2", "serve.data_parallel_size=4", "serve.kv_cache_dtype=auto")
    plan = planned(*sets, config=config)
    (cache,) = plan.caches
    assert (cache.name, cache.heads, cache.head_dim, cache.device_heads) == ("latent", 1, 176, 1)
    assert cache.bytes_per_token == cache.read_bytes_per_token == 2 * (256 + 128) * 2
    assert cache.unpadded_bytes_per_token == 2 * 176 * 2
    found, split = weights_of(plan), "split over 2"
    assert found["attention", split] == 2 * 8 * (96 * 64 + 160 * 80 + 32 * 256)
    small = 2 * (256 * (96 + 176) + 96 + 160) + (2 * 2 + 1) * 256 + (256 + 1) * 8
    assert found["norms and small projections", "whole on each"] == 2 * small
    one = next(step for step in plan.decode if step.sequences == 1 and step.tokens == 4096)
    # Each device has four heads, with scores over 176 features and values of 160.
    attended = 2 * 4 * (176 + 160) * 4096 * 2
    linear = one.flops - attended
    two = next(step for step in plan.decode if step.sequences == 1 and step.tokens == 512)
    assert two.flops == pytest.approx(linear + attended / 8)


def test_qwen3_next_weight_bytes_match_hand_counts(planned: Plan) -> None:
    """Plan Qwen 3 Next, on vLLM's own model: three delta-net layers, the second without experts, and one
    attention layer."""
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16}
    mixed = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "mlp_only_layers": [1]}
    sizes = {"num_hidden_layers": 4, "linear_value_head_dim": 32, "shared_expert_intermediate_size": 48}
    config = {**DENSE, "model_type": "qwen3_next", **linear, **mixed, **sizes}
    plan = planned("serve.tensor_parallel_size=2", "serve.data_parallel_size=4", config=config)
    split = "split over 2"
    net = 2 * (2 * 16 + 2 * 3 * 32) + 2 * 2 * 3 + 6 * 32
    small = 3 * ((2 * 2 * 16 + 6 * 32) * 4 + 2 * 6 + 32) + 2 * 128 + 3 * (8 + 1) * 256 + (2 * 4 + 1) * 256
    assert weights_of(plan) == {
        ("embeddings", split): 501 * 256 * 2,
        ("gated delta nets", split): 3 * 256 * net,
        ("attention", split): 256 * 8 * (2 * 128) + 8 * 128 * 256,
        ("keys and values", split): 2 * 256 * 4 * 128,
        ("MLP", split): 3 * 256 * (3 * 48 + 512),
        # Each device pads its 32 features of the gate and up projections to 128.
        ("experts", split): 3 * 8 * 256 * (2 * 2 * 128 + 64),
        ("norms and small projections", "whole on each"): small * 2,
        ("output head", split): 256 * 1001,
    }


def test_reference_server_has_the_published_weights_and_cache(planned: Plan) -> None:
    plan = planned()
    vision = weights_of(plan)["vision tower", "split over 8, positions whole"]
    assert abs(plan.weight_bytes - 7.75e9) < 0.02 * 7.75e9
    assert abs(plan.weight_bytes - vision - 7.75e9) < 0.02 * 7.75e9
    # The size of tpu-inference's own step when it is compiled for the chip.
    assert round(plan.weight_bytes / 1e9, 2) == 7.86
    assert round((plan.weight_bytes - vision) / 1e9, 2) == 7.68
    local, whole = plan.caches
    assert (local.name, local.layers, local.device_heads, local.bytes_per_token) == ("local", 50, 2, 51_200)
    # Each of eight devices holds one of four heads. Eight-bit keys and values are padded to sixteen.
    assert (whole.name, whole.layers, whole.device_heads, whole.bytes_per_token) == ("global", 10, 1, 20_480)
    assert whole.unpadded_bytes_per_token * 4 == whole.bytes_per_token
    assert not plan.windows_bound
    step = next(step for step in plan.decode if (step.sequences, step.tokens) == (64, 4096))
    assert round(step.whole_cache_bytes / 1e9, 1) == 18.8
    assert round(step.cache_bytes / 1e9, 1) == 8.7
    assert plan.tokens_fit == 311_622 and plan.sequences_fit == 19


@pytest.mark.parametrize(
    "sets",
    ["serve.decode_block_sizes=[1, 1024, 1, 1024]", "serve.env={RPA_V3_DECODE_BLOCK_SIZES: '1,1024,1,1024'}"],
)
def test_small_decode_blocks_reduce_cache_reads(planned: Plan, sets: str) -> None:
    def full(*changes: str) -> StepBounds:
        return next(step for step in planned(*changes).decode if (step.sequences, step.tokens) == (64, 4096))

    whole, blocks, odd = full(), full(sets), full("serve.decode_block_sizes=[1, 2048, 1, 2048]")
    assert round(blocks.whole_cache_bytes / 1e9, 1) == 8.7 and blocks.bound_seconds == whole.bound_seconds
    assert blocks.estimate_seconds < 0.7 * whole.estimate_seconds
    # A window of 1,024 at position 4,096 begins within the second block of 2,048, which is read whole.
    local = 64 * 50 * 4 * 256
    assert odd.whole_cache_bytes == whole.whole_cache_bytes - local * 2048


def test_published_times_exceed_their_bounds_and_estimates(planned: Plan) -> None:
    times = [one for one in planned().comparisons if one.unit == "ms"]
    assert [one.published for one in times] == [61, 45, 13.5, 24]
    for one in times:
        assert one.estimate is not None and one.bound <= one.estimate < one.published
    for another in (
        "serve.kv_cache_dtype=bfloat16",
        "serve.quantization=fp8",
        "serve.tensor_parallel_size=4",
    ):
        assert planned(another).comparisons == ()


def test_fp8_cache_saves_nothing_if_a_device_has_one_head(planned: Plan) -> None:
    fp8, bf16 = (planned(f"serve.kv_cache_dtype={kind}").caches for kind in ("fp8", "bfloat16"))
    assert bf16[0].bytes_per_token == 2 * fp8[0].bytes_per_token
    assert bf16[1].bytes_per_token == fp8[1].bytes_per_token
    apart = planned("serve.tensor_parallel_size=4", "serve.data_parallel_size=2").caches[1]
    assert apart.bytes_per_token == 10 * 2 * 2 * 512  # still one head per device, and no head is stored twice
    assert apart.unpadded_bytes_per_token * 2 == apart.bytes_per_token


def test_layers_with_a_shared_cache_store_nothing_and_are_read(planned: Plan) -> None:
    plan = planned(
        "model.id=google/gemma-4-E2B-it",
        "serve.accelerator=v6e-1",
        "serve.tensor_parallel_size=1",
        "serve.kv_cache_dtype=auto",
    )
    local, whole = plan.caches
    assert (local.layers, local.shared, local.bytes_per_token) == (12, 16, 12 * 2 * 256 * 2)
    assert (whole.layers, whole.shared, whole.bytes_per_token) == (3, 4, 3 * 2 * 512 * 2)
    assert local.read_bytes_per_token == 28 * 2 * 256 * 2
    step = next(step for step in plan.decode if (step.sequences, step.tokens) == (1, 4096))
    assert step.cache_bytes == 28 * 2 * 256 * 2 * 512 + 7 * 2 * 512 * 2 * 4096
    assert step.whole_cache_bytes == (28 * 2 * 256 * 2 + 7 * 2 * 512 * 2) * 4096
    weights = weights_of(plan)
    # Keys and values of 16 local and 4 global layers, which are loaded but not used.
    assert weights["keys and values, not used", "whole"] == 2 * 2 * 1536 * (16 * 256 + 4 * 512)
    per_layer = 262_144 * 35 * 256 * 2
    assert weights["embeddings", "whole"] == per_layer + 262_144 * 1536 * 2
    assert step.weight_bytes < plan.weight_bytes - per_layer
    patches = 16 * (4 * 768 * 768 + 3 * 768 * 3072) + 3 * 256 * 768 + 768 * 1536 + 2 * 10_240 * 768
    assert weights["vision tower", "whole"] == 2 * patches
    assert not any("audio tower" in note for note in plan.notes)


def test_key_value_heads_are_repeated_if_devices_outnumber_them(planned: Plan) -> None:
    plan = planned(config=DENSE)
    weights = weights_of(plan)
    assert weights["keys and values", "4 heads repeated over 8"] == 2 * 2 * 256 * 1 * 128 * 2
    assert weights["output head", "whole on each"] == 256 * 1001 * 2
    (cache,) = plan.caches
    assert cache.device_heads == 1
    assert cache.bytes_per_token == 2 * 4 * 128  # two slots padded to four
    assert cache.unpadded_bytes_per_token == 2 * 2 * 4 * 128 / 8


def test_heads_of_size_64_store_key_and_value_in_one_slot(planned: Plan) -> None:
    config = {**DENSE, "head_dim": 64}
    assert planned("serve.kv_cache_dtype=auto", config=config).cache_bytes_per_token == 2 * 2 * 128 * 2
    one = ("serve.tensor_parallel_size=2", "serve.data_parallel_size=4")
    assert planned(*one, "serve.kv_cache_dtype=auto", config=config).cache_bytes_per_token == 2 * 2 * 128 * 2


def test_key_value_heads_that_tp_cannot_split_or_copy_are_refused(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "config.json").write_text(json.dumps(_with_heads(12, 6)))
    sets = ["model.id=.", "serve.tensor_parallel_size=4", "serve.data_parallel_size=2"]
    found = lower(load(tmp_path / "recipe.yaml", sets), planning=True).diagnostics
    (refused,) = [d for d in found if d.code == "E0606"]
    assert "6 key/value heads, which tensor_parallel_size 4 can neither split nor copy" in refused.message
    assert refused.help == "tensor_parallel_size: 2, data_parallel_size: 4"


def _with_heads(heads: int, kv_heads: int) -> dict[str, object]:
    return {**DENSE, "num_attention_heads": heads, "num_key_value_heads": kv_heads}


def test_fp8_halves_all_weights_except_embeddings_norms_and_vision(planned: Plan) -> None:
    plain, merged = planned(), planned("merge.quantization=fp8")
    served = planned("serve.quantization=fp8")
    for quantized in (merged, served):
        for key, size in weights_of(plain).items():
            whole = key[0] in ("embeddings", "norms and small projections", "vision tower")
            assert weights_of(quantized)[key] == (size if whole else size / 2)


def test_experts_halve_only_if_served_in_fp8_and_are_read_by_use(planned: Plan) -> None:
    model = "model.id=google/gemma-4-26B-A4B-it"
    plain, merged, served = (
        planned(model),
        planned(model, "merge.quantization=fp8"),
        planned(model, "serve.quantization=fp8"),
    )
    key = ("experts", "split over 8")
    # 88 features of the gate and up projections on each device are padded to 128.
    experts = 30 * 128 * 2816 * (2 * 128 + 88) * 2
    assert weights_of(plain)[key] == weights_of(merged)[key] == experts == 2 * weights_of(served)[key]
    one, many = plain.decode[:2]
    assert one.sequences == 1 and many.sequences == 64
    # A token uses 8 of 128 experts. Evenly routed, 64 tokens miss few experts.
    assert many.weight_bytes - one.weight_bytes == pytest.approx(
        experts * ((1 - (120 / 128) ** 64) - 8 / 128)
    )


def test_experts_are_whole_on_a_device_with_expert_parallelism(planned: Plan) -> None:
    flag = "serve.extra_args={enable_expert_parallel: true, gpu_memory_utilization: 0.9}"
    plan = planned("model.id=google/gemma-4-26B-A4B-it", flag)
    assert weights_of(plan)["experts", "split over 8"] == 30 * 128 / 8 * 2816 * (2 * 768 + 704) * 2


def test_vllms_own_model_has_a_second_head_rotary_tables_and_split_heads(planned: Plan) -> None:
    """Plan a tied model of a class that tpu-inference does not implement, and one that it does."""
    config = {**DENSE, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    weights = weights_of(planned(config={**config, "tie_word_embeddings": True}))
    assert weights["output head", "split over 8"] == 256 * 128 * 2  # 1,001 rows padded to 1,024
    assert weights["embeddings", "split over 8"] == 256 * 126 * 2
    assert weights["rotary tables", "whole on each"] == 16384 * 128 * 2
    assert weights["keys and values", "each of 4 heads split over 8"] == 2 * 2 * 256 * 4 * 128 / 8 * 2
    thin = planned(config={**config, "head_dim": 80})
    assert weights_of(thin)["attention", "split over 8"] == 2 * 2 * 256 * 8 * 80 / 8 * 2
    assert thin.cache_bytes_per_token == 2 * 4 * 128  # in eight bits, with the head padded to 128
    # Gemma 2 multiplies with the embedding itself.
    assert ("output head", "split over 8") not in weights_of(planned("model.id=google/gemma-2-27b-it"))
    known = weights_of(planned(config={**LLAMA, "tie_word_embeddings": True}))
    assert not {"output head", "rotary tables"} & {name for name, _ in known}
    heard = planned("model.id=google/gemma-4-E2B-it", "serve.env={MODEL_IMPL_TYPE: vllm}")
    assert "vLLM's own model has an audio tower, which is not counted" in heard.notes


def test_windows_limit_the_cache_of_gemma_3_unless_hybrid_cache_is_off(planned: Plan) -> None:
    model = "model.id=google/gemma-3-27b-it"
    plan = planned(model)
    assert plan.windows_bound
    local, whole = plan.caches
    kept = local.bytes_per_token * (1024 - 1 + 4096) + whole.bytes_per_token * 16384
    assert plan.sequences_fit == int(plan.cache_bytes // kept)
    flag = 'serve.extra_args={"disable-hybrid-kv-cache-manager": true, "gpu-memory-utilization": 0.9}'
    off = planned(model, flag)
    assert not off.windows_bound
    assert off.sequences_fit == int(off.cache_bytes // (off.cache_bytes_per_token * 16384))
    # Gemma 4's head sizes differ between layers.
    assert not planned("serve.env={MODEL_IMPL_TYPE: vllm}").windows_bound


def test_benchmark_points_are_limited_by_rate_or_max_num_seqs(planned: Plan) -> None:
    plan = planned(
        "benchmark.input_lengths=[512]", "benchmark.request_rates=[1, 4, inf]", "benchmark.prompts=1000"
    )
    one, four, all_at_once = plan.loads
    assert [one.limited_by, four.limited_by, all_at_once.limited_by] == ["rate", "rate", "max_num_seqs"]
    # Little's law: the concurrent requests are the rate times a request's duration.
    for point in (one, four):
        assert point.request_rate is not None
        duration = point.ttft_seconds + 511 * point.tpot_seconds
        assert point.concurrency == pytest.approx(point.request_rate * duration, rel=1e-4)
        assert point.tokens_per_second == point.request_rate * 512
    assert all_at_once.request_rate is None and all_at_once.concurrency == 64
    step_bytes = 7_676_666_488 + 64 * 768 * 71_680
    assert all_at_once.tpot_seconds == pytest.approx(step_bytes / 1638e9)
    assert all_at_once.tokens_per_second == pytest.approx(64 / (step_bytes / 1638e9))
    usd = 21.52 / 3600 / all_at_once.tokens_per_second * 1e6
    assert all_at_once.usd_per_million_tokens == pytest.approx(usd)


def test_concurrency_is_limited_by_prompts_cache_or_replica_count(planned: Plan) -> None:
    inf, few = "benchmark.request_rates=[inf]", "benchmark.prompts=10"
    assert planned(inf, few).loads[0].limited_by == "prompts"
    many = ("serve.max_num_seqs=1024", "benchmark.prompts=2000", inf)
    point = planned(*many).loads[1]
    assert point.limited_by == "cache"
    assert point.concurrency == pytest.approx(22_337_131_400 / 71_680 / (4096 + 256))
    two = planned("serve.tensor_parallel_size=4", "serve.data_parallel_size=2", inf, "benchmark.prompts=999")
    assert two.loads[0].concurrency == 128


def test_benchmark_point_above_max_model_len_is_left_out(planned: Plan) -> None:
    plan = planned("serve.max_model_len=4096")
    assert {point.input_length for point in plan.loads} == {512}
    assert any("4,096 tokens in and 512 out are more than max_model_len" in note for note in plan.notes)


def test_server_without_cache_for_one_sequence_does_not_start(planned: Plan) -> None:
    plan = planned("serve.extra_args={gpu_memory_utilization: 0.25}")
    found = too_small(plan)
    assert plan.sequences_fit == 0 and found is not None
    assert found.code == "W1006" and "does not start" in found.message
    assert too_small(planned()) is None
    assert {point.input_length for point in plan.loads} == {512, 4096}
    assert planned("serve.extra_args={gpu_memory_utilization: 0.236}").tokens_fit < 1024
    none = planned("serve.extra_args={gpu_memory_utilization: 0.1}")
    assert none.cache_bytes == 0 and none.tokens_fit == 0 and none.loads == ()
    assert "0 tokens" in write(document(none))


def test_tpu7x_device_is_half_a_chip_and_has_no_list_price(planned: Plan) -> None:
    plan = planned("serve.accelerator=tpu7x-8")
    assert plan.hbm_bytes == 96 * 2**30 and plan.devices_per_chip == 2
    step = plan.decode[0]
    assert step.memory_seconds == pytest.approx((step.weight_bytes + step.cache_bytes) / 3690e9)
    assert step.all_reduce_seconds == pytest.approx(step.all_reduce_bytes / 600e9)
    assert plan.usd_per_hour is None and plan.loads[0].usd_per_million_tokens is None
    assert "no price is known" in write(document(plan))
    own = planned("serve.accelerator=tpu7x-8", "cost.serve_usd_per_hour=40")
    assert (own.usd_per_hour, own.price_source) == (40, "the recipe")


def test_missing_serve_section_and_invalid_memory_share_are_refused(planned: Plan) -> None:
    with pytest.raises(ArtifactError, match="no section `serve`") as caught:
        planned("serve=null")
    assert caught.value.help
    for value in ("lots", "0", "1.5", "nan"):
        with pytest.raises(ArtifactError, match="not a share of the memory"):
            memory_share({"gpu_memory_utilization": value})
    assert memory_share({"device-memory-utilization": 0.5}) == 0.5
    assert memory_share({"gpu-memory-utilization": None}) == memory_share({})


def test_hourly_price_includes_idle_devices(planned: Plan) -> None:
    plan = planned("serve.tensor_parallel_size=4")
    assert any("4 devices are idle" in note for note in plan.notes)
    assert plan.usd_per_hour == 21.52


def test_serving_plan_round_trips_through_json(planned: Plan) -> None:
    plan = planned()
    assert SERVING_PLAN.validate_json(SERVING_PLAN.dump_json(plan)) == plan


@pytest.mark.parametrize(
    ("name", "sets"),
    [
        ("serving-31b", ("benchmark.request_rates=[4, inf]",)),
        (
            "serving-e2b",
            (
                "model.id=google/gemma-4-E2B-it",
                "serve.accelerator=v6e-1",
                "serve.tensor_parallel_size=1",
                "benchmark.request_rates=[4]",
            ),
        ),
    ],
)
def test_printed_serving_plan_matches_the_golden_file(
    planned: Plan, update: bool, name: str, sets: tuple[str, ...]
) -> None:
    path, printed = GOLDEN / f"{name}.txt", write(document(planned(*sets)))
    if update:
        path.write_text(printed)
    assert printed == path.read_text()
