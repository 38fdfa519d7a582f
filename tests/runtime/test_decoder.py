"""Compare every family of the shared decoder with transformers, and refuse configs that it does not cover.

The models are tiny, with random float32 weights of awkward shapes. Rows are padded and packed, on a mesh of
2 x 2."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.model.families import UnsupportedCheckpoint, family_of
from tests.runtime import training
from tests.runtime.decoders import CASES, EVERY, LIMIT, YARN, make
from tests.runtime.references import logits_apart

AXES = {"fsdp": 2, "tp": 2}
TWO = {"num_hidden_layers": 2}
WINDOW_AND_FULL = {**TWO, "layer_types": ["sliding_attention", "full_attention"]}
LINEAR_AND_FULL = {**TWO, "layer_types": ["linear_attention", "full_attention"]}
CONVOLUTION_AND_FULL = {**TWO, "layer_types": ["conv", "full_attention"]}
FEWER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen2", "qwen3", "olmo3", "cohere2"), WINDOW_AND_FULL),
    "qwen3_moe": {**TWO, "mlp_only_layers": [0]},
    "afmoe": WINDOW_AND_FULL,
    **dict.fromkeys(("gpt_oss", "deepseek_v3", "glm4_moe", "glm4_moe_lite"), TWO),
    **dict.fromkeys(("qwen3_5", "qwen3_next"), LINEAR_AND_FULL),
    **dict.fromkeys(("lfm2", "lfm2_moe"), CONVOLUTION_AND_FULL),
    "granitemoehybrid": {**TWO, "layer_types": ["mamba", "attention"]},
}
"""One layer of each kind, where a case has some twice: what XLA compiles grows with the layers."""
OF_OTHERS = (
    *("deepseek_v2", "ernie4_5", "glm", "qwen2_moe", "seed_oss", "granitemoe", "mixtral", "olmoe"),
    *("qwen3_5_moe", "qwen3_moe-windows"),
)
"""Whose parts other cases have too: Qwen 3's and Qwen 3 Next's, gpt-oss's, GLM's."""

ALONE = ("mistral-mistral3", "mistral4-mistral3")
"""Of the multimodal cases, one, and that of a family whose text model has no class in transformers' table."""


@pytest.mark.usefixtures("highest")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.nightly)
        if ("wrapper" in values and case not in ALONE) or case in OF_OTHERS
        else case
        for case, values in CASES.items()
    ],
)
def test_logits_match_transformers(
    case: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Compare padded rows, and packed samples with each sample by itself."""
    model = make(case, tmp_path, **FEWER.get(case, {}))
    mesh, built = training.build(tmp_path, AXES, remat="none", targets=EVERY)
    difference, size = logits_apart(model, built, mesh)
    record_property("logits", difference / size)
    print(f"\n{case}: logits differ by {difference:.1e} of {size:.1f}")
    assert size > 5, "logits are not flat"
    assert difference <= LIMIT * size


@pytest.mark.usefixtures("highest")
def test_olmo3_scales_rope_frequencies_only_in_full_attention_layers(tmp_path: Path) -> None:
    """Compare with transformers 5.12, whose layers with a window get a rotary embedding of their own here."""
    import copy

    model = make("olmo3", tmp_path, rope_parameters=YARN)
    mesh, built = training.build(tmp_path, AXES, remat="none", targets=EVERY)
    scaled, size = logits_apart(model, built, mesh)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {"rope_type": "default", "rope_theta": YARN["rope_theta"]}
    plain = type(model.model.rotary_emb)(config)

    def turn_plainly(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "position_embeddings": plain(args[0], kwargs["position_ids"])}

    for kind, layer in zip(config.layer_types, model.model.layers, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(turn_plainly, with_kwargs=True)
    difference, size = logits_apart(model, built, mesh)
    print(
        f"\nolmo3-yarn: logits differ by {difference:.1e} of {size:.1f}; by {scaled:.1e} where all are scaled"
    )
    assert difference <= LIMIT * size
    assert scaled > 0.1


@pytest.mark.usefixtures("highest")
def test_deepseek_v2_logits_match_corrected_transformers(tmp_path: Path) -> None:
    """Compare with transformers 5.12 after two corrections: yarn's factor of the scores, and the choice of
    experts in groups."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

    groups = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
    yarn = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}
    model = make("deepseek_v2", tmp_path, **TWO, **groups, rope_parameters=yarn)
    mesh, built = training.build(tmp_path, AXES, remat="none", targets=EVERY)
    model.model.layers[1].mlp.num_experts = model.config.n_routed_experts
    left_out, size = logits_apart(model, built, mesh)
    for layer in model.model.layers:
        layer.self_attn.scaling *= yarn_get_mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2
    difference, size = logits_apart(model, built, mesh)
    print(f"\ndeepseek_v2: logits differ by {difference:.1e} of {size:.1f}; by {left_out:.1e} without it")
    assert difference <= LIMIT * size
    assert left_out > 0.1


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("llama", {"hidden_size": 50, "num_attention_heads": 6}, "hidden_size"),
        ("cohere2", {"hidden_size": 50, "num_attention_heads": 6}, "hidden_size"),
        ("granite", {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
        ("starcoder2", {"hidden_size": 36, "num_attention_heads": 4}, "head_dim"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": -4, "max_window_layers": 0},
            "sliding_window",
        ),
        ("olmo3", {"sliding_window": 2.5}, "sliding_window"),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types"),
        (
            "olmo3",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types",
        ),
        ("qwen3", {"num_hidden_layers": 1, "layer_types": [{}]}, "layer_types"),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size"),
        ("llama4", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
        ("llama4", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "layer_types"),
        ("llama4", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ("llama4", {"moe_layers": [0, 48]}, "moe_layers"),
        ("llama4", {"moe_layers": [[]]}, "moe_layers"),
        ("llama4", {"interleave_moe_layer_step": 0}, "interleave_moe_layer_step"),
        ("llama4", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("llama4", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
        ("llama4", {"floor_scale": 0}, "floor_scale"),
        ("llama4", {"use_qk_norm": 1}, "use_qk_norm"),
        ("qwen2", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ("smollm3", {"num_hidden_layers": 1, "no_rope_layers": [[]]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma", {"hidden_act": "swiglu"}, "hidden_act"),
        ("glm4", {"hidden_act": ["silu"]}, "hidden_act"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("granite", {"residual_multiplier": math.nan}, "residual_multiplier"),
        ("granite", {"embedding_multiplier": "12"}, "embedding_multiplier"),
        ("granite", {"attention_multiplier": -1.0}, "attention_multiplier"),
        ("cohere2", {"logit_scale": math.nan}, "logit_scale"),
        ("olmo2", {"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ("phi3", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (
            "mistral3",
            {"text_config": {"model_type": "mistral", "quantization_config": {}}},
            "quantization_config",
        ),
        (
            "ministral3",
            {"rope_parameters": {"llama_4_scaling_beta": 0.1}},
            "original_max_position_embeddings",
        ),
        ("ministral3", {"rope_parameters": {**YARN, "llama_4_scaling_beta": "1"}}, "llama_4_scaling_beta"),
        ("starcoder2", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ("starcoder2", {"use_bias": 1}, "use_bias"),
        ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("olmo2", {"attention_dropout": -0.1}, "attention_dropout"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("mixtral", {"router_jitter_noise": -0.1}, "router_jitter_noise"),
        ("olmoe", {"num_experts": 7}, "num_experts_per_tok"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("olmoe", {"norm_topk_prob": 1}, "norm_topk_prob"),
        ("granitemoe", {"num_local_experts": 40, "num_experts_per_tok": -8}, "num_experts_per_tok"),
        ("glm4_moe", {"n_group": 3}, "n_group"),
        ("glm4_moe", {"n_group": -1}, "n_group"),
        ("glm4_moe", {"n_group": 4, "topk_group": 5}, "topk_group"),
        ("glm4_moe", {"n_group": 4, "topk_group": 0}, "topk_group"),
        ("glm4_moe", {"n_group": 32, "topk_group": 1}, "num_experts_per_tok"),
        ("glm4_moe", {"routed_scaling_factor": -1.0}, "routed_scaling_factor"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts"),
        ("glm4_moe", {"n_routed_experts": 2.5}, "n_routed_experts"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fbgemm_fp8"}}, "quantization_config"),
        ("deepseek_v3", {"num_key_value_heads": 64}, "num_key_value_heads"),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, "head_dim"),
        ("deepseek_v3", {"kv_lora_rank": 0}, "kv_lora_rank"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "mscale_all_dim": 1.0}}, "rope_scaling"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"num_hidden_layers": 1, "mlp_layer_types": [[]]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
        ("glm_moe_dsa", {"q_lora_rank": None}, "q_lora_rank"),
        ("glm_moe_dsa", {"index_topk": 0}, "index_topk"),
        ("glm_moe_dsa", {"mlp_layer_types": "sparse"}, "mlp_layer_types"),
        ("mistral4", {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0}}, "partial_rotary_factor"),
        ("mistral4", {"rope_parameters": {**YARN, "llama_4_scaling_beta": "1"}}, "llama_4_scaling_beta"),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("qwen3_moe", {"mlp_only_layers": [24]}, "mlp_only_layers"),
        ("falcon_h1", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("falcon_h1", {"mamba_d_head": 16}, "mamba_d_ssm"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ("falcon_h1", {"mlp_multipliers": [1.0, "2"]}, "mlp_multipliers"),
        ("falcon_h1", {"key_multiplier": -1.0}, "key_multiplier"),
        ("falcon_h1", {"time_step_limit": [0.1, {"__float__": "NaN"}]}, "time_step_limit"),
        ("falcon_h1", {"mamba_rms_norm": 1}, "mamba_rms_norm"),
        ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act"),
        ("granitemoehybrid", {"layer_types": ["mamba", "mlp"]}, "layer_types"),
        ("granitemoehybrid", {"mamba_d_head": 16}, "mamba_expand"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("granitemoehybrid", {"num_local_experts": -1}, "num_local_experts"),
        ("granitemoehybrid", {"hidden_act": "gelu"}, "hidden_act"),
        ("lfm2", {"full_attn_idxs": [32]}, "full_attn_idxs"),
        ("lfm2", {"layer_types": ["linear_attention"] * 32}, "layer_types"),
        ("lfm2", {"conv_bias": 1}, "conv_bias"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of"),
        ("lfm2_moe", {"num_experts": 3}, "num_experts_per_tok"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset"),
        ("jamba", {"expert_layer_period": 0}, "expert_layer_period"),
        ("jamba", {"mamba_dt_rank": 0}, "mamba_dt_rank"),
        ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
        ("jamba", {"hidden_act": "gelu"}, "hidden_act"),
        ("jamba", {"num_local_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok"),
        ("nemotron_h", {"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["mamba", []]}, "layers_block_type"),
        ("nemotron_h", {"layers_block_type": ["mamba"], "num_hidden_layers": 2}, "layers_block_type"),
        ("nemotron_h", {"n_groups": 3}, "n_groups"),
        ("nemotron_h", {"n_routed_experts": 1}, "num_experts_per_tok"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts"),
        ("nemotron_h", {"moe_latent_size": -1}, "moe_latent_size"),
        ("qwen3_next", {"linear_num_key_heads": 5}, "linear_num_key_heads"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen3_5_moe", {"text_config": {"layer_types": ["sliding_attention"] * 40}}, "layer_types"),
        ("afmoe", {"score_func": "softmax"}, "score_func"),
        ("afmoe", {"route_norm": False}, "route_norm"),
        ("afmoe", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers"),
        ("ernie4_5_moe", {"moe_k": 65}, "moe_k"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_layer_start_index": 28}, "moe_layer_start_index"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("minimax_m2", {"rotary_dim": 256}, "partial_rotary_factor"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias"),
        ("olmo", {"clip_qkv": 0}, "clip_qkv"),
        ("qwen2_moe", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "layer_types"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"num_local_experts": 3}, "num_experts_per_tok"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_invalid_config_value_is_refused_by_its_key(kind: str, change: dict[str, Any], key: str) -> None:
    config = {"model_type": kind, **change}
    with pytest.raises(UnsupportedCheckpoint, match=key) as refusal:
        family_of(config).architecture(config)
    assert refusal.value.key == key


@pytest.mark.usefixtures("highest")
def test_experts_split_over_the_ep_axis_give_transformers_logits(tmp_path: Path) -> None:
    """Split experts over ep, where rows go to the devices that hold their experts, and compare logits with
    transformers."""
    model = make("qwen3_moe", tmp_path, num_hidden_layers=2, mlp_only_layers=[], num_experts=6)
    mesh, built = training.build(tmp_path, {"fsdp": 1, "ep": 2, "tp": 2}, remat="none", targets=EVERY)
    split = {p.path: p.spec for p in built.parameters}["layers.0.mlp.experts.gate_up"]
    difference, size = logits_apart(model, built, mesh)
    assert split == ("ep", "fsdp", None, "tp")
    assert difference <= LIMIT * size


def test_llama_4_scaling_beta_of_zero_disables_query_growth() -> None:
    """Devstral 2 123B gives a growth of 0."""
    config = {"model_type": "ministral3", "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.0}}
    assert family_of(config).architecture(config).query_growth is None


def test_minimax_rotary_dim_sets_the_number_of_rotated_features() -> None:
    """transformers does not read this number, and takes a share of a head, by default all of it."""
    config = {"model_type": "minimax_m2"}
    family = family_of(config)
    told = family.architecture({**config, "rotary_dim": 64})
    assert told == family.architecture({**config, "partial_rotary_factor": 0.5})
    assert told != family.architecture(config)
