"""Tests of miniature checkpoints: complete for transformers, with the original's layout, and reproducible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lowering import catalog
from recipec.compiler.rehearse.miniature import VOCABULARY, complete, shrink, write_checkpoint
from recipec.compiler.rehearse.miniature_recipe import scale_axes
from recipec.runtime.model.families import family_of

MESHES = [{"fsdp": 4, "tp": 1}, {"fsdp": 1, "tp": 4}, {"fsdp": 4, "tp": 2}]

MODELS = [
    "google/gemma-4-31B-it",
    "google/gemma-4-E2B-it",
    "google/gemma-4-26B-A4B-it",
    "google/gemma-4-12B-it",
    "google/gemma-3-27b-it",
    "google/gemma-3-270m-it",
    "google/gemma-2-27b-it",
    "meta-llama/Llama-3.1-8B-Instruct",
    "Qwen/Qwen2.5-7B-Instruct",
    "Qwen/Qwen3-8B",
    *("tiiuae/Falcon-H1-0.5B-Instruct", "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16"),
    "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    *("arcee-ai/Trinity-Nano-Preview", "baidu/ERNIE-4.5-21B-A3B-PT", "ModelCloud/MiniMax-M2-BF16"),
    *("tencent/Hunyuan-7B-Instruct", "nvidia/Nemotron-Mini-4B-Instruct", "allenai/OLMo-1B-hf"),
    *("arcee-ai/AFM-4.5B", "swiss-ai/Apertus-8B-Instruct-2509", "tiiuae/Falcon-H1-34B-Instruct"),
    *("ibm-granite/granite-4.0-h-tiny", "ibm-granite/granite-4.0-h-350m", "ibm-granite/granite-4.0-micro"),
    *("LiquidAI/LFM2-1.2B", "LiquidAI/LFM2-2.6B", "LiquidAI/LFM2-8B-A1B"),
    *("ai21labs/Jamba-v0.1", "ai21labs/AI21-Jamba-Reasoning-3B"),
    *("HuggingFaceH4/starchat2-15b-sft-v0.1", "openbmb/MiniCPM5-1B", "unsloth/DeepSeek-V3-0324-BF16"),
]

YARN = {
    **{"type": "yarn", "rope_type": "yarn", "rope_theta": 1_000_000.0, "factor": 16.0, "beta_fast": 32.0},
    **{"beta_slow": 1.0, "original_max_position_embeddings": 16_384, "llama_4_scaling_beta": 0.1},
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1 + i / 4 for i in range(48)]}
NET = {
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
    **{"linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    **{"hidden_size": 2048, "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 2},
    "max_position_embeddings": 262_144,
}
GROUPS = {"n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
SHARED = {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Llama 2 7B": {
        **{"model_type": "llama", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{
            "max_position_embeddings": 4096,
            "rope_scaling": None,
            "pretraining_tp": 1,
            "torch_dtype": "float16",
        },
        **{"architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2},
    },
    "Mistral 7B": {
        **{"model_type": "mistral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"max_position_embeddings": 32_768, "sliding_window": 4096, "rope_theta": 10_000.0},
    },
    "Ministral 3 8B": {
        **{"model_type": "mistral3", "image_token_index": 10, "vision_config": {"model_type": "pixtral"}},
        "text_config": {
            **{"model_type": "ministral3", "vocab_size": 131_072, "hidden_size": 4096, "head_dim": 128},
            **{"intermediate_size": 14_336, "num_hidden_layers": 34, "num_attention_heads": 32},
            **{"num_key_value_heads": 8, "max_position_embeddings": 262_144, "rope_parameters": YARN},
        },
    },
    "Qwen 2.5 with a window": {
        **{"model_type": "qwen2", "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944},
        **{"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4},
        **{"use_sliding_window": True, "sliding_window": 131_072, "max_window_layers": 14},
    },
    "Phi 4 mini": {
        **{"model_type": "phi3", "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192},
        **{"num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8},
        **{"partial_rotary_factor": 0.75, "max_position_embeddings": 131_072, "sliding_window": 262_144},
        **{"original_max_position_embeddings": 4096, "rope_scaling": LONGROPE, "bos_token_id": 199_999},
        **{"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "pad_token_id": 199_999},
    },
    "Gemma 7B": {
        **{"model_type": "gemma", "vocab_size": 256_000, "hidden_size": 3072, "intermediate_size": 24_576},
        **{"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 256},
    },
    "Granite 8B": {
        **{"model_type": "granite", "vocab_size": 49_155, "hidden_size": 4096, "intermediate_size": 12_800},
        **{"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"attention_multiplier": 0.0078125, "embedding_multiplier": 12.0, "residual_multiplier": 0.22},
        **{"logits_scaling": 16.0, "tie_word_embeddings": True, "rope_theta": 10_000_000.0},
    },
    "OLMo 2 13B": {
        **{"model_type": "olmo2", "vocab_size": 100_352, "hidden_size": 5120, "intermediate_size": 13_824},
        **{"num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 40},
    },
    "OLMo 3 7B": {
        **{"model_type": "olmo3", "vocab_size": 100_278, "hidden_size": 4096, "intermediate_size": 11_008},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32},
        **{"sliding_window": 4096, "max_position_embeddings": 8192},
    },
    "SmolLM 3 3B": {
        **{"model_type": "smollm3", "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 11_008},
        **{"num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 4},
        **{"no_rope_layers": [1, 1, 1, 0] * 9, "no_rope_layer_interval": 4, "pad_token_id": 128_004},
        **{"layer_types": ["full_attention"] * 36, "use_sliding_window": False, "sliding_window": None},
    },
    "GLM 4 9B": {
        **{"model_type": "glm4", "vocab_size": 151_552, "hidden_size": 4096, "intermediate_size": 13_696},
        **{"num_hidden_layers": 40, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
        **{"partial_rotary_factor": 0.5, "attention_bias": True, "eos_token_id": [151_329, 151_336]},
        **{"pad_token_id": 151_329},
    },
    "StarCoder2 3B": {
        **{"model_type": "starcoder2", "vocab_size": 49_152, "hidden_size": 3072},
        **{"intermediate_size": 12_288, "num_hidden_layers": 30, "num_attention_heads": 24},
        **{"num_key_value_heads": 2, "sliding_window": 4096, "use_bias": True, "bos_token_id": 0},
    },
    "Qwen 3.5 9B": {
        **{"model_type": "qwen3_5", "image_token_id": 248_056, "vision_config": {"depth": 27}},
        "tie_word_embeddings": False,
        "text_config": {
            **{"model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 4096, "head_dim": 256},
            **{"intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16},
            **{"num_key_value_heads": 4, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
            **{"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128},
            **{"linear_value_head_dim": 128, "max_position_embeddings": 262_144, "eos_token_id": 248_044},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
                **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
            },
        },
    },
    "gpt-oss 20B": {
        **{"model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880},
        **{"num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64},
        **{"num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "swiglu_limit": 7.0},
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        **{"sliding_window": 128, "attention_bias": True, "rope_theta": 150_000, "rms_norm_eps": 1e-5},
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
            "original_max_position_embeddings": 4096,
        },
        **{"max_position_embeddings": 131_072, "initial_context_length": 4096, "tie_word_embeddings": False},
        **{"eos_token_id": 200_002, "pad_token_id": 199_999},
        "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    },
    "Qwen 3 30B-A3B": {
        **{"model_type": "qwen3_moe", "vocab_size": 151_936, "hidden_size": 2048, "head_dim": 128},
        **{"intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32},
        **{"num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"norm_topk_prob": True, "use_sliding_window": False, "sliding_window": None},
        **{"max_window_layers": 48, "max_position_embeddings": 40_960, "rope_theta": 1_000_000.0},
    },
    "Qwen 3 Next 80B-A3B": {
        **{"model_type": "qwen3_next", "vocab_size": 151_936, "num_hidden_layers": 48, **NET, **SHARED},
        **{"num_experts": 512, "num_experts_per_tok": 10, "decoder_sparse_step": 1, "mlp_only_layers": []},
        **{"intermediate_size": 5120, "norm_topk_prob": True, "partial_rotary_factor": 0.25},
        **{"rope_theta": 10_000_000, "tie_word_embeddings": False},
    },
    "Qwen 3.5 35B-A3B": {
        **{"model_type": "qwen3_5_moe", "image_token_id": 248_056, "vision_config": {"depth": 27}},
        "tie_word_embeddings": False,
        "text_config": {
            **{"model_type": "qwen3_5_moe_text", "vocab_size": 248_320, "num_hidden_layers": 40, **NET},
            **{"num_experts": 256, "num_experts_per_tok": 8, "mtp_num_hidden_layers": 1, **SHARED},
            "rope_parameters": {
                **{"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
                **{"mrope_interleaved": True, "mrope_section": [11, 11, 10]},
            },
        },
    },
    "Mixtral 8x7B": {
        **{"model_type": "mixtral", "vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None, "rope_theta": 1e6},
        **{"router_jitter_noise": 0.0, "router_aux_loss_coef": 0.02, "max_position_embeddings": 32_768},
    },
    "OLMoE 1B-7B": {
        **{"model_type": "olmoe", "vocab_size": 50_304, "hidden_size": 2048, "intermediate_size": 1024},
        **{"num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 16},
        **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None},
    },
    "Granite 3.1 1B-A400M": {
        **{"model_type": "granitemoe", "vocab_size": 49_155, "hidden_size": 1024, "intermediate_size": 512},
        **{"num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 8},
        **{"num_local_experts": 32, "num_experts_per_tok": 8, "attention_multiplier": 0.015625},
        **{"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 6.0},
        "tie_word_embeddings": True,
    },
    "GLM 4.5 Air": {
        **{"model_type": "glm4_moe", "vocab_size": 151_552, "hidden_size": 4096, "head_dim": 128},
        **{"intermediate_size": 10_944, "moe_intermediate_size": 1408, "num_hidden_layers": 46},
        **{"num_attention_heads": 96, "num_key_value_heads": 8, "partial_rotary_factor": 0.5},
        **{"n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1},
        **{"topk_group": 1, "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False},
        **{"routed_scaling_factor": 1.0, "attention_bias": True, "num_nextn_predict_layers": 1},
        **{"eos_token_id": [151_329, 151_336, 151_338], "pad_token_id": 151_329},
    },
    "DeepSeek V3": {
        **{"model_type": "deepseek_v3", "vocab_size": 129_280, "hidden_size": 7168, **GROUPS},
        **{"intermediate_size": 18_432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
        **{"num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_nextn_predict_layers": 1},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"first_k_dense_replace": 3, "moe_layer_freq": 1, "routed_scaling_factor": 2.5},
        **{"max_position_embeddings": 163_840, "rope_theta": 10_000, "rms_norm_eps": 1e-6},
        "rope_scaling": {
            **{"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0},
            **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
        },
    },
    "GLM 5.2": {
        **{"model_type": "glm_moe_dsa", "vocab_size": 154_880, "hidden_size": 6144, "head_dim": 192},
        **{"intermediate_size": 12_288, "moe_intermediate_size": 2048, "num_hidden_layers": 78},
        **{"num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048, "kv_lora_rank": 512},
        **{"qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "num_nextn_predict_layers": 1},
        **{"n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "norm_topk_prob": True},
        **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5},
        **{"index_topk": 2048, "index_head_dim": 128, "index_n_heads": 32, "index_topk_freq": 4},
        **{"indexer_types": ["full"] * 2 + ["full", "shared", "shared", "shared"] * 19},
        **{"mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "max_position_embeddings": 1_048_576},
        "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    },
    "Mistral Small 4": {
        **{"model_type": "mistral3", "image_token_index": 10, "vision_config": {"model_type": "pixtral"}},
        "text_config": {
            **{"model_type": "mistral4", "vocab_size": 131_072, "hidden_size": 4096},
            **{"rope_parameters": {**YARN, "partial_rotary_factor": 0.5}, "num_hidden_layers": 36},
            **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64},
            **{"v_head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 32},
            **{"n_routed_experts": 128, "num_experts_per_tok": 4, "moe_intermediate_size": 2048},
        },
    },
    "Llama 4 Scout": {
        **{"model_type": "llama4", "image_token_index": 200_092, "vision_config": {"image_size": 336}},
        "text_config": {
            **{"model_type": "llama4_text", "vocab_size": 202_048, "hidden_size": 5120, "head_dim": 128},
            **{"intermediate_size": 8192, "intermediate_size_mlp": 16_384, "num_hidden_layers": 48},
            **{"num_attention_heads": 40, "num_key_value_heads": 8, "max_position_embeddings": 10_485_760},
            **{"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
            **{"moe_layers": list(range(48)), "no_rope_layers": [], "attention_chunk_size": 8192},
            **{"use_qk_norm": True, "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1},
            **{"rope_theta": 500_000.0, "eos_token_id": [200_001, 200_007], "for_llm_compressor": False},
            "rope_scaling": {
                **{"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
                "original_max_position_embeddings": 8192,
            },
        },
    },
    "Falcon 2 11B": {
        **{"model_type": "falcon", "hidden_size": 4096, "num_hidden_layers": 60, "num_attention_heads": 32},
        **{"num_kv_heads": 8, "ffn_hidden_size": 16_384, "new_decoder_architecture": True},
        **{"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False, "rope_theta": 500_042.0},
    },
    "Pythia 6.9B": {
        **{"model_type": "gpt_neox", "vocab_size": 50_432, "hidden_size": 4096, "intermediate_size": 16_384},
        **{"num_hidden_layers": 32, "num_attention_heads": 32, "rotary_pct": 0.25},
    },
    "Phi 2": {
        **{"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.4},
    },
    "StableLM 2 12B": {
        **{"model_type": "stablelm", "vocab_size": 100_352, "hidden_size": 5120, "num_hidden_layers": 40},
        **{"intermediate_size": 13_824, "num_attention_heads": 32, "num_key_value_heads": 8},
        **{"qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False},
    },
    "Command R7B": {
        **{"model_type": "cohere2", "vocab_size": 256_000, "hidden_size": 4096, "head_dim": 128},
        **{"intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": 4},
        **{"logit_scale": 0.25, "bos_token_id": 5, "eos_token_id": 255_001},
    },
    "Apertus": {
        **{"model_type": "apertus", "vocab_size": 131_072, "hidden_size": 4096, "hidden_act": "xielu"},
        **{"intermediate_size": 21_504, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "max_position_embeddings": 65_536, "attention_bias": False},
    },
}
"""The sizes of published checkpoints, which need not be in the catalog."""


def shrunk(model: str, axes: dict[str, int]) -> dict[str, Any]:
    return shrink(PUBLISHED[model] if model in PUBLISHED else catalog.entries()[model]["config"], axes)


ALIKE = ("Granite 3.1 1B-A400M", "Mixtral 8x7B", "OLMoE 1B-7B", "Qwen 3 30B-A3B", "Qwen 3.5 35B-A3B")
"""Models whose kinds of layers and experts others have too."""


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=pytest.mark.nightly) if name in ALIKE else name
        for name in (*MODELS, *PUBLISHED)
    ],
)
def test_transformers_loads_every_miniature_without_missing_weights(model: str, tmp_path: Path) -> None:
    import torch
    import transformers

    config = shrunk(model, {"fsdp": 2, "tp": 2})
    write_checkpoint(tmp_path / "model", config, dtype="float32")
    build = getattr(transformers, config["architectures"][0])
    loaded, info = build.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert {kind: list(found) for kind, found in info.items() if found} == {}
    logits = loaded(input_ids=torch.arange(3, 43).reshape(2, 20)).logits
    assert torch.isfinite(logits).all()
    assert logits.std() > 1, "flat logits would hide differences"


def test_quickstart_checkpoint_loads_as_a_complete_gemma_4(tmp_path: Path) -> None:
    import transformers

    config = complete(catalog.entries()["recipec/tiny-gemma4"]["config"])
    write_checkpoint(tmp_path / "model", config, dtype="bfloat16")
    loaded, info = transformers.Gemma4ForConditionalGeneration.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )
    assert {kind: list(found) for kind, found in info.items() if found} == {}
    assert loaded.config.text_config.vocab_size == VOCABULARY
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("model", ["google/gemma-4-31B-it", "google/gemma-3-27b-it", "google/gemma-3-1b-it"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_miniature_keeps_layer_kinds_and_head_ratios_of_the_original(
    model: str, axes: dict[str, int]
) -> None:
    original = catalog.find(model, Path()).architecture
    config = shrunk(model, axes)
    family = family_of(config)
    small = family.architecture(config)
    assert family.name == original.family
    assert small.layer_types == original.layer_types[: small.num_layers]
    assert set(small.layer_types) == set(original.layer_types)
    for kind in small.layer_types:
        i, j = small.layer_types.index(kind), original.layer_types.index(kind)
        assert small.heads(i) * original.kv_heads(j) == original.heads(j) * small.kv_heads(i)
        assert original.kv_heads(j) % axes["tp"] or small.kv_heads(i) % axes["tp"] == 0
    assert getattr(small, "k_eq_v", None) == getattr(original, "k_eq_v", None)
    assert getattr(small, "softcap", None) == getattr(original, "softcap", None)
    assert getattr(small, "query_scale_heads", None) == getattr(original, "query_scale_heads", None)
    assert getattr(small, "global_scale", None) == getattr(original, "global_scale", None)
    for parameter in family.parameters(small):
        for size, axis in zip(parameter.shape, parameter.spec, strict=True):
            assert axis is None or size % axes[axis] == 0 or original.kv_heads(0) % axes["tp"], parameter.path


@pytest.mark.parametrize("dense", [{"mlp_only_layers": [5]}, {"decoder_sparse_step": 3}], ids=str)
def test_miniature_keeps_both_dense_and_expert_layers(dense: dict[str, Any]) -> None:
    config = PUBLISHED["Qwen 3 30B-A3B"] | dense
    original: Any = family_of(config).architecture(config)
    small: Any = family_of(config).architecture(shrink(config, {"fsdp": 4, "tp": 2}))
    assert set(small.routed) == set(original.routed) == {True, False}
    assert small.routing == (8, 2)


def test_miniature_sizes_are_divisible_by_three_devices() -> None:
    small = family_of(config := shrunk("google/gemma-3-270m-it", {"fsdp": 3, "tp": 1})).architecture(config)
    assert small.hidden_size % 3 == small.intermediate_size % 3 == small.vocab_size % 3 == 0


@pytest.mark.parametrize(
    "scaling",
    [
        {"type": "dynamic", "factor": 2.0},
        {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"type": "yarn", "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1, "truncate": False},
        {"type": "longrope", "short_factor": [1.0 + i for i in range(64)], "long_factor": [2.0] * 64},
    ],
    ids=lambda scaling: scaling["type"],
)
def test_miniature_keeps_each_kind_of_rope_scaling(scaling: dict[str, Any]) -> None:
    """Keep positions beyond the context that is extended, with the miniature's smaller heads."""
    for before in ({}, {"original_max_position_embeddings": 1024}):
        config = {"model_type": "llama", "max_position_embeddings": 4096, "rope_scaling": scaling | before}
        original: Any = family_of(config).architecture(config)
        small: Any = family_of(config).architecture(shrink(config))
        rope = small.ropes[0][1]
        assert (rope.kind, rope.original) == (
            scaling["type"],
            64 if scaling["type"] != "dynamic" or not before else 256,
        )
        assert rope.factor == original.ropes[0][1].factor
        assert rope.short[:2] == ((1.0, 9.0) if scaling["type"] == "longrope" else ())


def test_equal_seeds_give_identical_checkpoint_files(tmp_path: Path) -> None:
    config = shrunk("google/gemma-4-31B-it", MESHES[0])
    for name in ("a", "b", "c"):
        write_checkpoint(tmp_path / name, config, ["One two three.", "Four?"], seed=int(name == "c"))
    first, second, other = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b", "c")
    )
    assert first == second
    assert {name for name in first if first[name] != other[name]} == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }


def test_the_index_names_every_tensor_once(tmp_path: Path) -> None:
    from safetensors import safe_open

    write_checkpoint(tmp_path / "model", shrunk("google/gemma-4-31B-it", MESHES[0]), shards=3)
    index = json.loads((tmp_path / "model" / "model.safetensors.index.json").read_text())
    found = {}
    for file in sorted((tmp_path / "model").glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            found |= dict.fromkeys(tensors.keys(), file.name)
    assert found == index["weight_map"]
    assert len(set(found.values())) == 3
    assert any("vision_tower" in name for name in found)


@pytest.mark.parametrize(
    ("model", "start", "end"),
    [
        ("google/gemma-4-31B-it", "<|turn>", "<turn|>"),
        ("google/gemma-3-1b-it", "<start_of_turn>", "<end_of_turn>"),
    ],
)
def test_chat_template_writes_the_turn_markers_of_the_family(
    model: str, start: str, end: str, tmp_path: Path
) -> None:
    import transformers

    config = shrunk(model, MESHES[0])
    write_checkpoint(tmp_path / "model", config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert len(tokenizer) == VOCABULARY
    messages = [{"role": "user", "content": "Hello, äpfel? "}, {"role": "assistant", "content": "Yes."}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    assert text == f"<bos>{start}user\nHello, äpfel?{end}\n{start}model\nYes.{end}\n"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text
    ids = tokenizer.convert_tokens_to_ids([tokenizer.pad_token, "<eos>", "<bos>", end])
    assert ids == [0, 1, 2, 5]
    text_config = config.get("text_config", config)
    assert [text_config[f"{name}_token_id"] for name in ("pad", "eos", "bos")] == ids[:3]
    markers = {key: value for key, value in config.items() if key.startswith(("image", "boi", "eoi"))}
    names = {tokenizer.convert_ids_to_tokens(value) for value in markers.values()}
    assert all("image" in name for name in names)


@pytest.mark.parametrize(
    ("axes", "small"),
    [
        ({"fsdp": 4, "tp": 1}, {"fsdp": 4, "tp": 1}),
        ({"fsdp": 16, "tp": 4}, {"fsdp": 2, "tp": 4}),
        ({"fsdp": 64, "tp": 1}, {"fsdp": 8, "tp": 1}),
        ({"fsdp": 1, "tp": 4}, {"fsdp": 1, "tp": 4}),
    ],
)
def test_mesh_axes_shrink_to_at_most_eight_devices(axes: dict[str, int], small: dict[str, int]) -> None:
    assert scale_axes(axes) == small
