"""Tiny checkpoints of every family of the common decoder, as text models and as half of multimodal models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import tiny

LIMIT = 1e-5
"""Relative to the largest logit, and to a loss: the float32 noise of either library."""
PLAIN = ("c_fc", "dense", "fc1", "fc2", "query_key_value", "dense_h_to_4h", "dense_4h_to_h")
EVERY = (r".*_proj(_\w+)?", *PLAIN, r".*(?<=shared_mlp\.)(in|out)put_linear", r".*(?<=feed_forward\.)w[123]")
"""LoRA targets that select every projection of each family."""
CLOSED = dict.fromkeys(("falcon_h1", "nemotron_h", "nemotron_h-latent"), (r"(.*\.)?(?!out)\w+_proj",))
"""Targets of the families whose out_proj PEFT refuses."""

SIZES = {
    "vocab_size": tiny.VOCAB,
    "hidden_size": 48,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
"""A number of heads that is not a multiple of 4 and not hidden size / head width; a prime vocabulary."""
SLIDING, FULL, LINEAR, CHUNKED = (f"{kind}_attention" for kind in ("sliding", "full", "linear", "chunked"))
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 5, "layer_types": [SLIDING, SLIDING, FULL, SLIDING]}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 8.0, "original_max_position_embeddings": 8}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.5, 2.0, 4.0],
}
NETS = {
    "num_hidden_layers": 3,
    "layer_types": [LINEAR, FULL, LINEAR],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    # A head's output can be almost zero, and its norm would amplify float32's noise: in transformers and here
    # logits would differ from float64's by 1e-5 of their size.
    "rms_norm_eps": 1e-2,
}
GRANITE = {
    **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.4},
    "logits_scaling": 0.5,
}
SEVEN = {"num_experts": 7, "num_experts_per_tok": 3}
LOCAL = {"num_local_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 36}
GROUPS = {"n_group": 4, "topk_group": 2}
MIXED = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 36}
"""A number of experts that no mesh axis divides; a token uses some of them."""
MIXERS = {
    "mamba_n_heads": 6,
    "mamba_n_groups": 3,
    "mamba_d_head": 16,
    "mamba_d_state": 7,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
}
STATES = {
    "mamba_num_heads": 6,
    "mamba_head_dim": 10,
    "n_groups": 3,
    "ssm_state_size": 7,
    "conv_kernel": 3,
    "chunk_size": 64,  # transformers 5.12 carries states wrongly from chunk to chunk here, in torch
    # transformers' torch code limits steps by this; its kernels do not.
    "time_step_min": 1e-9,
    "rescale_prenorm_residual": False,
}
SELECTIVE = {"mamba_d_state": 7, "mamba_d_conv": 3, "use_mamba_kernels": False}
LATENT = {
    "num_hidden_layers": 3,
    "num_key_value_heads": 6,
    "head_dim": 6,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 14,
    # Not the 1e-6 of the norms of compressed queries, keys and values.
    "rms_norm_eps": 1e-2,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 28,
    "n_routed_experts": 12,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
}
"""Heads whose queries and keys are wider than their values. Their 6 features that rotate are also
transformers' head_dim."""
LLAMA4 = {
    "num_hidden_layers": 4,
    "attention_chunk_size": 5,
    "interleave_moe_layer_step": 2,
    "intermediate_size": 36,
    "intermediate_size_mlp": 56,
    "num_local_experts": 7,
    "num_experts_per_tok": 2,
    "floor_scale": 3,
    "attn_scale": 0.7,
    "no_rope_layer_interval": 3,
    # One bound for divided and undivided dimensions, as in Scout.
    "rope_parameters": {**tiny.LLAMA3_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
}
"""Chunks that divide neither rows nor samples, and a layer of each kind: full and chunked, with and
without rotation, dense and with experts."""

CASES: dict[str, dict[str, Any]] = {
    "llama-biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-untied": {"rope_parameters": dict(tiny.LLAMA3_ROPE)},
    "mistral": {"sliding_window": 5},
    "ministral3": {
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5}
    },
    "qwen2": {"use_sliding_window": True, **WINDOWS, "head_dim": None},
    "qwen3": {"use_sliding_window": True, **WINDOWS, "rope_parameters": YARN},
    "phi3": {"sliding_window": 5},
    "phi3-longrope": {
        "head_dim": None,
        "partial_rotary_factor": 0.75,
        "max_position_embeddings": 64,
        # Every sample is longer: a shorter one would be rotated differently alone than in a row with others.
        "original_max_position_embeddings": 2,
        "rope_parameters": {**LONGROPE, "partial_rotary_factor": 0.75},
        "tie_word_embeddings": True,
    },
    "gemma1": {"model_type": "gemma"},
    "granite": {**GRANITE, "head_dim": None},
    "olmo2": {},
    "olmo3": {**WINDOWS},
    "smollm3": {"num_hidden_layers": 4},
    "glm4": {"attention_bias": True, "head_dim": 16},
    "starcoder2": {"sliding_window": 5},
    "qwen3_5": {"model_type": "qwen3_5_text", **NETS},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text", **NETS, **MIXED, "shared_expert_intermediate_size": 20},
    "qwen3_next": {**NETS, **MIXED, "mlp_only_layers": [0], "shared_expert_intermediate_size": 20},
    "qwen3_moe": {"num_hidden_layers": 4, "mlp_only_layers": [2], **MIXED, "norm_topk_prob": True},
    # A window in every layer, regardless of max_window_layers.
    "qwen3_moe-windows": {
        "decoder_sparse_step": 2,
        **MIXED,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
        "attention_bias": True,
    },
    "mixtral": {
        "sliding_window": 5,
        "intermediate_size": 36,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
    },
    "olmoe": {"intermediate_size": 36, **SEVEN},
    "granitemoe": {
        "intermediate_size": 36,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        **GRANITE,
        "tie_word_embeddings": True,
    },
    "glm4_moe": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "attention_bias": True,
        "use_qk_norm": True,
        "moe_intermediate_size": 28,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        **GROUPS,
        "routed_scaling_factor": 2.5,
    },
    "deepseek_v3": {
        **LATENT,
        "q_lora_rank": 22,
        **GROUPS,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7},
    },
    "deepseek_v3-half": {
        **LATENT,
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "rope_interleave": False,
        "first_k_dense_replace": 0,
        "num_hidden_layers": 2,
    },
    "deepseek_v2": {**LATENT, "q_lora_rank": None},
    "glm4_moe_lite": {**LATENT, "q_lora_rank": 22},
    "glm_moe_dsa": {
        **LATENT,
        "q_lora_rank": 22,
        # Tokens of the longest row that is compared: in longer ones, tokens would not see all earlier ones.
        **{"index_topk": 37, "index_head_dim": 8, "index_n_heads": 3},
        "indexer_types": ["full", "shared", "full"],
    },
    "gpt_oss": {
        **LOCAL,
        "num_hidden_layers": 3,
        "sliding_window": 5,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "llama4": {"model_type": "llama4_text", **LLAMA4},
    "afmoe": {
        **WINDOWS,
        "mup_enabled": True,
        "num_dense_layers": 1,
        **SEVEN,
        "moe_intermediate_size": 28,
        "num_shared_experts": 2,
        "route_scale": 2.5,
    },
    "apertus": {"rope_parameters": dict(tiny.LLAMA3_ROPE)},
    "arcee": {"head_dim": 8, "mlp_bias": True, "rope_parameters": YARN},
    "ernie4_5": {"use_bias": True},
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 28,
        "moe_num_experts": 7,
        "moe_k": 3,
        "moe_num_shared_experts": 2,
    },
    "glm": {"head_dim": 16},
    "hunyuan_v1_dense": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
    },
    "minimax_m2": {
        "head_dim": 16,
        **LOCAL,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    },
    "nemotron": {"head_dim": 16},
    "olmo": {"clip_qkv": 1.0},
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "mlp_only_layers": [1],
        **MIXED,
        "shared_expert_intermediate_size": 20,
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 2,
    },
    "seed_oss": {},
    "cohere2": {**WINDOWS, "logit_scale": 2.0},
    "falcon_h1": {
        "mamba_d_ssm": 60,
        "mamba_n_heads": 6,
        "mamba_n_groups": 3,
        "mamba_d_state": 7,
        "mamba_d_conv": 3,
        "mamba_chunk_size": 8,
        "mamba_proj_bias": True,
        "projectors_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "lm_head_multiplier": 0.7,
        "embedding_multiplier": 3.0,
        "key_multiplier": 0.9,
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 0.8,
        "ssm_out_multiplier": 1.2,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [0.8, 1.1],
    },
    "granitemoehybrid": {
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "intermediate_size": 28,
        "shared_intermediate_size": 20,
        "num_local_experts": 5,
        "num_experts_per_tok": 3,
        **MIXERS,
        **GRANITE,
        "tie_word_embeddings": True,
    },
    "granitemoehybrid-dense": {
        "layer_types": ["attention", "mamba"],
        "shared_intermediate_size": 20,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        **MIXERS,
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "attention_multiplier": 0.3,
        "position_embedding_type": "rope",
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        **SEVEN,
        **SELECTIVE,
        "mamba_dt_rank": 5,
        "mamba_proj_bias": True,
    },
    "jamba-dense": {
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "num_experts": 1,
        **SELECTIVE,
        "mamba_conv_bias": False,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", FULL, "conv"],
        "block_multiple_of": 10,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "lfm2-biases": {
        "full_attn_idxs": [1],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": True,
        "conv_L_cache": 5,
        "norm_eps": 1e-3,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", FULL, "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 28,
        **SEVEN,
        "routed_scaling_factor": 2.5,
    },
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mamba", "moe"],
        **STATES,
        "use_bias": True,
        "moe_intermediate_size": 36,
        "moe_shared_expert_intermediate_size": 20,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        **GROUPS,
        "routed_scaling_factor": 2.5,
    },
    "nemotron_h-latent": {
        "layers_block_type": ["moe", "mamba", "attention"],
        **STATES,
        "use_conv_bias": False,
        "moe_intermediate_size": 36,
        "moe_latent_size": 28,
        "moe_shared_expert_intermediate_size": 20,
        "n_routed_experts": 7,
        "num_experts_per_tok": 2,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 72},
    "falcon-one-norm": {
        "new_decoder_architecture": True,
        "num_ln_in_parallel_attn": 1,
        "num_kv_heads": 3,
        "ffn_hidden_size": 72,
        "bias": True,
        "tie_word_embeddings": False,
    },
    "falcon-one-key": {"ffn_hidden_size": 72},
    "gpt_neox": {"rotary_pct": 0.5},
    "gpt_neox-serial": {
        "use_parallel_residual": False,
        "attention_bias": False,
        "rotary_pct": 1.0,
        "rotary_emb_base": 5_000,
        "tie_word_embeddings": True,
    },
    "phi": {"num_key_value_heads": 2},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm-parallel": {"qk_layernorm": True, "use_parallel_residual": True, "partial_rotary_factor": 0.5},
    "mistral-mistral3": {"wrapper": "mistral3", "sliding_window": None},
    "ministral3-mistral3": {
        "wrapper": "mistral3",
        "new_names": True,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5},
    },
    "mistral4-mistral3": {
        "wrapper": "mistral3",
        **LATENT,
        "head_dim": 16,
        "q_lora_rank": 22,
        **GROUPS,
        "rope_parameters": {**YARN, "llama_4_scaling_beta": 0.5, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    "llama-llava": {"wrapper": "llava"},
    "llama4-multimodal": {
        "wrapper": "llama4",
        "model_type": "llama4_text",
        **LLAMA4,
        "use_qk_norm": False,
        "moe_layers": [1, 3],
        "no_rope_layers": [1, 0, 0, 1],
        "layer_types": [FULL, CHUNKED, FULL, CHUNKED],
    },
    # transformers does not scale logits here, but does for the text model; vLLM scales them in both.
    "cohere2-vision": {"wrapper": "cohere2_vision", **WINDOWS, "logit_scale": 1.0},
}
"""A config.json of each family, or several if one does not cover everything.

A name begins with the model_type, if the config has none. Those with a `wrapper` are the text half of a
multimodal checkpoint, with the names that transformers saves, or newer ones by `new_names`.
"""

VISION = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
WRAPPERS: dict[str, dict[str, Any]] = {
    "mistral3": {"vision_config": {"model_type": "pixtral", "head_dim": 16}, "image_token_index": 508},
    "llava": {"vision_config": {"model_type": "clip_vision_model"}, "image_token_index": 508},
    "cohere2_vision": {
        "vision_config": {"model_type": "siglip_vision_model"},
        "image_token_id": 508,
        "alignment_intermediate_size": 32,
    },
    "llama4": {
        "vision_config": {
            "model_type": "llama4_vision_model",
            "vision_output_dim": 24,
            "projector_input_dim": 24,
            "projector_output_dim": 24,
        },
        "image_token_index": 508,
    },
}
"""The rest of a multimodal config.json, besides its text config."""
NEW_NAMES = {
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
}

SHORT = {
    *("qwen2", "phi", "phi3-longrope", "granite", "olmoe", "granitemoe", "cohere2", "cohere2-vision"),
    *("falcon", "falcon-one-norm", "falcon-one-key", "gpt_neox", "gpt_neox-serial"),
    *("olmo", "qwen2_moe", "stablelm", "stablelm-parallel"),
}
"""Cases whose head width, 8, is the hidden size over the number of heads, regardless of head_dim."""


ALWAYS = ("phi3",)
E2E = ("olmo2", "qwen3_moe", "deepseek_v3", "llama4", "qwen3_next", "falcon_h1", "nemotron_h")


def marked(case: str) -> Any:
    """Mark a slow test's case: `make test` has the one with fused projections, `make e2e` those that differ
    most from it, `make nightly` the others."""
    if case in ALWAYS:
        return case
    return pytest.param(case, marks=pytest.mark.e2e if case in E2E else pytest.mark.nightly)


def fields(case: str) -> dict[str, Any]:
    """Return the config.json of a case."""
    return {**SIZES, "model_type": case.partition("-")[0], **CASES[case]}


def make(case: str, folder: Path, **changes: Any) -> Any:
    """Write a checkpoint and return transformers' model.

    Args:
        changes: to the text's config.json.
    """
    import transformers

    values = fields(case) | changes
    wrapper, new_names = values.pop("wrapper", None), values.pop("new_names", False)
    if case in SHORT:
        values.pop("head_dim", None)
    if wrapper is None:
        config = transformers.AutoConfig.for_model(**values)
        kinds = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    else:
        more = WRAPPERS[wrapper]
        config = transformers.AutoConfig.for_model(
            wrapper,
            text_config=values,
            tie_word_embeddings=values["model_type"] == "cohere2",
            **{**more, "vision_config": {**VISION, **more["vision_config"]}},
        )
        kinds = transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    config._attn_implementation = "eager"
    model = tiny.write(kinds[type(config)], config, folder)
    if new_names:
        rename(folder / "model.safetensors", NEW_NAMES)
    return model


def text_model(model: Any) -> Any:
    """Return the text half of transformers' model, without its head."""
    inner = model.base_model  # the model itself for Llama 4's multimodal one
    inner = getattr(inner, "language_model", inner)
    return getattr(inner, "model", inner)


def layers(model: Any) -> Any:
    """Return the list of layers of transformers' model."""
    text = text_model(model)
    return text.h if hasattr(text, "h") else text.layers


def rename(file: Path, prefixes: dict[str, str]) -> None:
    """Change the prefixes of a file's tensors; every given prefix must occur."""
    from safetensors.numpy import load_file, save_file

    arrays = load_file(file)
    for old, new in prefixes.items():
        chosen = [name for name in arrays if name.startswith(old)]
        assert chosen
        for name in chosen:
            arrays[new + name.removeprefix(old)] = arrays.pop(name)
    save_file(arrays, file, {"format": "pt"})
