"""Tests of the analytic bounds against libtpu's compiler on the same steps.

The figures were recorded with libtpu 0.0.42.1 at its lowest effort, those of Gemma by Tunix's model
classes. The bytes of Gemma's arguments are of the decoder's arrays, without padding. The compiler's time
leaves out the output head's later chunks and splash attention's kernels.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from recipec.compiler.lowering.program import Program
from recipec.compiler.roofline.training_step import (
    bound,
    causal_pairs,
    chunked_pairs,
    model_flops,
    shapes,
    state_bytes,
)
from recipec.compiler.wording import split_layer
from tests.plan.plans import lowered

POLICIES = ("none", "block", "decoder", "save_attention", "save_dots", "offload_dots")


def program(name: str, *sets: str, layers: int | None = None) -> Program:
    """Lower a recipe, optionally cut to its first `layers` layers."""
    found = lowered(name, *sets)
    a = found.architecture
    if layers is None:
        return found
    return replace(
        found,
        architecture=replace(a, layer_types=a.layer_types[:layers]),
        parameters=tuple(p for p in found.parameters if (split_layer(p.path)[1] or 0) < layers),
        adapters=tuple(adapter for adapter in found.adapters if adapter.target.layer < layers),
    )


RECORDED = [
    # recipe, --set, layers, bytes of arguments and of temporaries, seconds, seconds that the time leaves out
    ("gemma4-31b-v5p8", (), 6, 2_629_997_092, 11_256_492_448, 0.12216, 0.0351 + 0.0197),
    ("gemma4-31b-v5p8", (), 12, 4_555_300_400, 16_599_838_720, 0.23742, 0.0351 + 0.0394),
    (
        "gemma4-31b-v5p8",
        ("mesh.axes={fsdp: 2, tp: 2}", "train.micro_batch_size=2"),
        6,
        2_463_028_004,
        7_795_285_600,
        0.11986,
        0.0351 + 0.0197,
    ),
    (
        "gemma4-31b-v5p8",
        ("mesh.axes={fsdp: 1, tp: 4}", "train.micro_batch_size=4"),
        6,
        2_443_083_172,
        6_599_172_736,
        0.11765,
        0.0351 + 0.0197,
    ),
    ("gemma4-31b-paper", (), 6, 2_534_255_020, 666_634_496, 0.05176, 0.0063),
    (
        "llama31-8b-v6e8",
        ("model.attention_block=512", "remat.policy=save_attention"),
        4,
        551_693_824,
        2_156_633_856,
        0.04808,
        0.0082 + 0.0025,
    ),
]


@pytest.mark.parametrize("name, sets, layers, arguments, temporaries, seconds, left_out", RECORDED)
def test_bound_is_below_the_recorded_compiler_figures(
    name: str,
    sets: tuple[str, ...],
    layers: int,
    arguments: float,
    temporaries: float,
    seconds: float,
    left_out: float,
) -> None:
    """Check that the bound is below the compiler's figures, and above half of its time."""
    cut = program(name, *sets, layers=layers)
    least = bound(cut, cut.recipe.data.max_length)
    assert 0.5 * (seconds + left_out) < least.seconds < seconds + left_out
    assert arguments < least.memory_bytes < arguments + temporaries


@pytest.mark.parametrize("name, sets, layers, arguments", [record[:4] for record in RECORDED])
def test_state_bytes_match_the_compiled_argument_bytes(
    name: str, sets: tuple[str, ...], layers: int, arguments: float
) -> None:
    """Compare weights, adapters, moments and gradients under each mesh. Only padding may differ."""
    assert state_bytes(program(name, *sets, layers=layers)) == pytest.approx(arguments, rel=0.002)


def test_bound_counts_the_fused_backward_kernel_for_large_blocks() -> None:
    from recipec.compiler.roofline.training_step import FUSED
    from recipec.runtime.model import attention

    assert attention.FUSED == FUSED
    one, two = (
        bound(program("llama31-8b-v6e8", f"model.attention_block={block}"), 4096) for block in (1024, 512)
    )
    assert one.seconds < two.seconds


def test_the_scores_of_a_vision_tower_are_those_of_the_runtime() -> None:
    from recipec.compiler.roofline.step_estimate import TOWER_SCORES
    from recipec.runtime.model.vision import parts

    assert parts.SCORES_BYTES == TOWER_SCORES


def test_bound_is_below_the_estimate_of_the_60_layer_flagship() -> None:
    """Compare with 60 layers extrapolated from 6 and 12: 1.149 s, 0.145 s of kernels and 72.5 GiB."""
    least = bound(program("gemma4-31b-v5p8"), 3072)
    assert 0.6 * 1.294 < least.seconds < 1.294
    assert 0.6 * 72.5 < least.memory_bytes / 2**30 < 72.5


def test_bound_orders_remat_policies_by_time_and_memory() -> None:
    """Check that more recomputation takes more time, and that more kept arrays take more memory."""
    least = {policy: bound(program("gemma4-31b-v5p8", f"remat.policy={policy}"), 3072) for policy in POLICIES}
    seconds = {policy: one.seconds for policy, one in least.items()}
    memory = {policy: one.memory_bytes for policy, one in least.items()}
    assert seconds["none"] == seconds["save_dots"] < seconds["block"] < seconds["save_attention"]
    assert seconds["save_attention"] < seconds["decoder"]
    assert memory["decoder"] < memory["save_attention"] < memory["save_dots"] <= memory["none"]


def test_unknown_remat_policy_gets_the_lowest_bound() -> None:
    """Check that the bound never excludes a policy that it does not know."""
    known = program("gemma4-31b-v5p8")
    recipe = known.recipe.model_copy(
        update={"remat": known.recipe.remat.model_copy(update={"policy": "some_day"})}
    )
    unknown = bound(replace(known, recipe=recipe), 3072)
    every = [bound(program("gemma4-31b-v5p8", f"remat.policy={policy}"), 3072) for policy in POLICIES]
    assert unknown.seconds <= min(one.seconds for one in every)
    assert unknown.memory_bytes <= min(one.memory_bytes for one in every)


@pytest.mark.parametrize(
    ("recipe", "numbers", "devices"),
    [
        ("qwen3-8b-dpo-v5e8", 6.946e9, 8),  # in linear layers; 1.24e9 are in the embedding and the head
        ("gemma4-26b-a4b-v5p8", 30 * 128 * 3 * 704 * 2816 + 1.65e9, 4),  # in experts and linear layers
    ],
)
def test_quantized_weights_and_experts_are_smaller(recipe: str, numbers: float, devices: int) -> None:
    whole, int8, nf4 = (
        state_bytes(program(recipe, f"model.quantization={kind}")) for kind in ("null", "int8", "nf4")
    )
    assert whole - int8 == pytest.approx(numbers / devices, rel=0.001)
    assert int8 - nf4 == pytest.approx(numbers / devices * (1 - 0.5 - 4 / 64), rel=0.001)


PAIRS = ("data.packing=false", "data.loss_on=completion", "serve=null")


def test_full_fine_tuning_state_counts_optimizer_and_reference_model() -> None:
    """Count AdamW's bytes in bfloat16.

    A weight takes 2 bytes, its float32 copy and moments take 12, and a reference model takes 2 more. Norms
    are not sharded.
    """
    sets = [
        *("lora=null", "merge.adapter=false", "mesh.accelerator=v5p-64"),
        *("mesh.axes={fsdp: 32}", "train.global_batch_size=32"),
    ]
    full = program("gemma4-31b-v5p8", *sets)
    assert state_bytes(full) == pytest.approx(full.base_parameters * 14 / 32, rel=0.002)
    dpo = program("gemma4-31b-v5p8", *sets, "train.objective=dpo", "data.format=preference", *PAIRS)
    assert state_bytes(dpo) == pytest.approx(full.base_parameters * 16 / 32, rel=0.002)


def test_dpo_bound_exceeds_orpo_by_one_reference_forward_pass() -> None:
    dpo = program("qwen3-8b-dpo-v5e8")
    orpo = program("qwen3-8b-dpo-v5e8", "train.objective=orpo")
    assert dpo.micro_batch_rows == orpo.micro_batch_rows == 8
    tokens, peak = 2 * 8 * 2048, 197e12 * 8
    # ORPO has no reference model, so it saves a forward pass: at least 2 FLOPs for each of 8.19e9 weights.
    less = bound(dpo, 2048).seconds - bound(orpo, 2048).seconds
    assert less * peak / tokens == pytest.approx(2 * 7.57e9, rel=0.06)


LLAMA_LAYERS = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336)
LLAMA_HEAD = 128_256 * 4096
LLAMA_PAIRS = 4097 / 2 * 4096 * 32
"""Pairs of a token in a row of 4,096, times the queries of all layers."""


def test_model_flops_of_lora_leave_out_the_frozen_weights_gradients() -> None:
    llama = program("llama31-8b-v6e8")
    expected = 4 * (LLAMA_LAYERS + LLAMA_HEAD) + 6 * 55_574_528 + 12 * LLAMA_PAIRS
    assert model_flops(llama, 1.0) == pytest.approx(expected, rel=1e-9)
    assert model_flops(llama, 32_768) == pytest.approx(32_768 * expected, rel=1e-9)


def test_model_flops_of_full_fine_tuning_count_every_weight_three_times() -> None:
    sets = ("lora=null", "merge.adapter=false", "mesh.accelerator=v6e-16", "mesh.axes={fsdp: 16}")
    full = program("llama31-8b-v6e8", *sets)
    assert model_flops(full, 1.0) == pytest.approx(
        6 * (LLAMA_LAYERS + LLAMA_HEAD) + 12 * LLAMA_PAIRS, rel=1e-9
    )


def test_model_flops_of_backward_pass_end_at_the_first_trained_layer() -> None:
    """Train adapters in the last eight layers only: the backward pass stops before the first 24."""
    last = program("llama31-8b-v6e8", "lora.layers=24-31")
    expected = 2 * LLAMA_LAYERS + 2 * LLAMA_LAYERS / 4 + 4 * LLAMA_HEAD
    expected += 6 * 55_574_528 / 4 + (4 + 8 / 4) * LLAMA_PAIRS
    assert model_flops(last, 1.0) == pytest.approx(expected, rel=1e-9)
    assert bound(last, 4096).seconds < bound(program("llama31-8b-v6e8"), 4096).seconds


def test_model_flops_of_train_only_leave_out_what_is_frozen() -> None:
    full = program("llama32-1b-full-v5e4")
    layers = (1_235_746_816 - 128_256 * 2048) / 16  # of each layer, without its norms
    only = program("llama32-1b-full-v5e4", r"train.trainable_modules=['layers\.(14|15)\.mlp\..*']")
    fewer = model_flops(full, 1.0) - model_flops(only, 1.0)
    frozen = 14 * 4 * layers + 2 * (2 * layers + 128_256 * 2048) - 2 * 2 * 3 * 2048 * 8192
    length = full.recipe.data.max_length
    assert fewer == pytest.approx(frozen + 14 * 8 * 2048 * (length + 1) / 2, rel=1e-6)
    assert bound(only, length).memory_bytes < 0.3 * bound(full, length).memory_bytes
    head = program(
        "llama31-8b-v6e8", "lora=null", "merge.adapter=false", "train.trainable_modules=['lm_head.*']"
    )
    assert model_flops(head, 1.0) == pytest.approx(2 * LLAMA_LAYERS + 6 * LLAMA_HEAD + 4 * LLAMA_PAIRS)


def test_norms_and_biases_are_not_counted_as_matrix_products() -> None:
    """Leave out norms and biases.

    OLMo 2's row norms and gpt-oss's expert biases have two dimensions, but they are no matrix products.
    """
    sets = ("serve=null", "lora={rank: 8, targets: [q_proj]}", "remat.policy=none")
    olmo = program("llama31-8b-v6e8", "model.id=allenai/OLMo-2-1124-7B", *sets)
    assert shapes(olmo, 64).layers[0].weights == 4 * 4096**2 + 3 * 4096 * 11_008
    gpt_oss = program("llama31-8b-v6e8", "model.id=openai/gpt-oss-20b", *sets)
    attention = 2880 * 64 * (64 + 8 + 8) + 64 * 64 * 2880
    assert shapes(gpt_oss, 64).layers[0].weights == attention + 2880 * 32 + 4 * 3 * 2880**2


@pytest.mark.parametrize(
    ("model", "targets", "hidden"),
    [
        ("microsoft/phi-2", "[dense, fc1, fc2]", 2560),
        ("EleutherAI/pythia-12b", "[dense, dense_h_to_4h, dense_4h_to_h]", 5120),
    ],
)
def test_last_projections_are_found_under_phi_and_pythia_names(model: str, targets: str, hidden: int) -> None:
    data = "data={train: [{path: x.jsonl}], format: text, max_length: 2048}"
    sets = (f"model.id={model}", "serve=null", f"lora={{rank: 8, targets: {targets}}}", data)
    layer = shapes(program("llama31-8b-v6e8", *sets), 64).layers[0]
    assert layer.attended == hidden
    assert layer.tails == {"self_attn.o_proj": hidden**2, "mlp.down_proj": 4 * hidden**2}


def test_model_flops_count_only_the_active_experts() -> None:
    """Count 26B-A4B: 3.8e9 of 25.2e9 weights at 4 FLOPs each, and a few percent of attention and adapters."""
    experts = program("gemma4-31b-v5p8", "model.id=google/gemma-4-26B-A4B-it")
    assert 4 * 3.6e9 < model_flops(experts, 1.0) < 4 * 4.8e9


def test_model_flops_ignore_remat_policy_and_attention_kernel() -> None:
    tokens = 12_288
    plain = model_flops(program("gemma4-31b-v5p8"), tokens)
    other = program("gemma4-31b-v5p8", "remat.policy=decoder", "model.attention=dot")
    assert model_flops(other, tokens) == plain


@pytest.mark.parametrize("length, window", [(1, None), (7, None), (7, 3), (7, 7), (7, 20), (300, 64)])
def test_causal_pairs_match_a_brute_force_count(length: int, window: int | None) -> None:
    counted = sum(q - k < (window or length) for q in range(length) for k in range(q + 1))
    assert causal_pairs(length, window) == counted


@pytest.mark.parametrize("length, chunk", [(1, 4), (4, 4), (7, 3), (7, 20), (300, 64)])
def test_chunked_pairs_match_a_brute_force_count(length: int, chunk: int) -> None:
    counted = sum(q // chunk == k // chunk for q in range(length) for k in range(q + 1))
    assert chunked_pairs(length, chunk) == counted
