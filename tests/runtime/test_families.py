"""Compare the Hugging Face side of the families (names, shapes, defaults) with transformers' own models."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from recipec.compiler import catalog
from recipec.compiler.miniature.fewer_layers import with_layers
from recipec.runtime.model.adapters import LoraSettings, build_adapters, matches, parse_layers
from recipec.runtime.model.families import FAMILIES, Architecture, UnsupportedCheckpoint, family_of
from recipec.runtime.model.families.decoder_family import DecoderFamily
from recipec.runtime.model.families.family import Parameter
from tests.runtime.decoders import YARN

ENTRIES = catalog.entries()
BASES = {
    name: entry["config"]
    for name, entry in ENTRIES.items()
    if entry.get("family") in ("gemma3", "gemma4") and not name.endswith("-it")
}
"""Families of which some layers, or some checkpoints, have other tensors."""


def distinct() -> dict[str, dict[str, Any]]:
    """Return text configs of the families whose layers are all alike, one for each set of tensors."""
    found: dict[tuple[Any, ...], tuple[str, dict[str, Any]]] = {}
    for name, entry in ENTRIES.items():
        if entry.get("family") in (None, "gemma3", "gemma4"):
            continue
        whole = entry["config"]
        # transformers has no causal models of these texts: test_towers.py.
        if whole["model_type"] in ("paddleocr_vl", "qwen3_vl", "qwen3_vl_moe"):
            continue
        text = {key: whole[key] for key in {"tie_word_embeddings"} & whole.keys()}
        text |= whole.get("text_config", whole)
        kept = ("tie_word_embeddings", "head_dim", "attention_bias")
        traits = (entry["family"], "text_config" in whole, *(text.get(key) for key in kept))
        found.setdefault(traits, (name, text))
    return dict(found.values())


DENSE_BASES = distinct()

OTHER_NAMES = {
    "ernie4_5_moe": (".gate.moe_statics.", ".moe_statics."),
    **dict.fromkeys(("minimax_m2", "mixtral"), (".mlp.", ".block_sparse_moe.")),
}
"""What transformers' models call differently than checkpoints do, and the checkpoints' names."""

ALPHA = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}
"""Hunyuan's scaling of the rotary base."""

SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


EXPERTS = {
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "hidden_size_per_layer_input": 0,
}


def hugging_face(config: dict[str, Any], layout: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that transformers saves for a config.json, without weights.

    Args:
        layout: "multimodal", or "text" for the language model alone.
    """
    text = deepcopy(config.get("text_config", config))
    kind = text["model_type"].removesuffix("_text")
    if layout == "text":
        loaded = transformers.AutoConfig.for_model(**text)
        model = {
            "gemma3": transformers.Gemma3ForCausalLM,
            "gemma4": transformers.Gemma4ForCausalLM,
            "gemma4_unified": transformers.Gemma4UnifiedForCausalLM,
        }[kind]
    else:
        small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        loaded = transformers.AutoConfig.for_model(kind, text_config=text, vision_config=small)
        model = {
            "gemma3": transformers.Gemma3ForConditionalGeneration,
            "gemma4": transformers.Gemma4ForConditionalGeneration,
            "gemma4_unified": transformers.Gemma4UnifiedForConditionalGeneration,
        }[kind]
    with torch.device("meta"):
        tensors = model(loaded).state_dict()
    tensors.pop("lm_head.weight")  # tied to the embedding, and not saved
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def sources(parameters: list[Parameter], prefix: str) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of every tensor that the parameters are made of; each is used once."""
    all_sources = [source for parameter in parameters for source in parameter.sources]
    assert max(Counter(source.name for source in all_sources).values()) == 1
    return {source.full_name(prefix): source.shape for source in all_sources}


def period(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config.json cut to its first local layers and the global one after them.

    If layers use others' keys and values, it keeps twice as many.
    """
    text = config.get("text_config", config)
    kinds = text.get("layer_types")
    layers = kinds.index("full_attention") + 1 if kinds else 6
    cut: dict[str, Any] = {}
    if text.get("num_kv_shared_layers"):
        cut["num_kv_shared_layers"], layers = layers, 2 * layers
    cut |= {"num_hidden_layers": layers} | ({"layer_types": kinds[:layers]} if kinds else {})
    return {**config, "text_config": text | cut} if text is not config else config | cut


@pytest.mark.parametrize("layout", ["text", "multimodal"])
@pytest.mark.parametrize("name", BASES)
def test_gemma_parameters_use_every_text_tensor_once(name: str, layout: str) -> None:
    config = period(BASES[name])
    family = family_of(config)
    saved = hugging_face(config, layout)
    prefix = next(p for p in family.prefixes if f"{p}embed_tokens.weight" in saved)
    assert prefix == ("model." if layout == "text" else "model.language_model.")
    text = {name: shape for name, shape in saved.items() if name.startswith(prefix)}
    architecture = family.architecture(config)
    assert sources(family.parameters(architecture), prefix) == text
    check_shapes(family, architecture)


@pytest.mark.parametrize("name", DENSE_BASES)
def test_dense_parameters_use_every_tensor_once(name: str) -> None:
    """Include biases, norms and an untied head, in two layers."""
    config = with_layers(DENSE_BASES[name], range(2))
    family = family_of(config)
    loaded = transformers.AutoConfig.for_model(**deepcopy(config))  # it writes into nested values
    auto = transformers.AutoModelForCausalLM.from_config
    build = (
        transformers.Mistral4ForCausalLM if family.name == "mistral4" else auto
    )  # its table lacks this one
    with torch.device("meta"):
        model = build(loaded)
    saved = {tensor_name: tuple(tensor.shape) for tensor_name, tensor in model.state_dict().items()}
    if loaded.tie_word_embeddings:
        saved.pop(f"{family.names.head}.weight")
    architecture = family.architecture_of(config, saved)  # transformers has all experts in one parameter
    old, new = OTHER_NAMES.get(family.name, ("", ""))
    saved = {name.replace(old, new): shape for name, shape in saved.items()}
    kept = {f"model.{kept}": shape for kept, shape in family.kept(config).items()}
    assert sources(family.parameters(architecture), family.prefixes[-1]) | kept == saved
    check_shapes(family, family.architecture(config))


def check_shapes(family: Any, architecture: Any) -> None:
    """Get each parameter's shape from its sources."""
    for parameter in family.parameters(architecture):
        assert len(parameter.spec) == len(parameter.shape)
        parts = []
        for source in parameter.sources:
            assert np.prod(source.reshape) == np.prod(source.shape)
            parts.append(tuple(source.reshape[axis] for axis in source.transpose))
        if len(parts) > 1:
            of_one = (n for axis, n in enumerate(parameter.shape) if axis not in parameter.stacked)
            assert set(parts) == {tuple(of_one)}
            assert len(parts) == np.prod([parameter.shape[axis] for axis in parameter.stacked])
        else:
            assert parts == [parameter.shape]


@pytest.mark.parametrize(
    ("kind", "config_class"),
    [
        ("gemma2", "Gemma2Config"),
        ("gemma3_text", "Gemma3TextConfig"),
        ("gemma4_text", "Gemma4TextConfig"),
        ("gemma4_unified_text", "Gemma4UnifiedTextConfig"),
        ("llama", "LlamaConfig"),
        ("qwen2", "Qwen2Config"),
        ("qwen3", "Qwen3Config"),
    ],
)
def test_architecture_defaults_match_transformers(kind: str, config_class: str) -> None:
    """Use a published config.json without transformers' defaults: google/gemma-3-4b-it names no heads."""
    family = family_of({"model_type": kind})
    full = getattr(transformers, config_class)().to_dict()
    assert family.architecture({"model_type": kind}) == family.architecture(full)


def test_old_and_new_gemma3_rope_keys_give_same_architecture() -> None:
    family = FAMILIES["gemma3"]
    old = BASES["google/gemma-3-4b-pt"]["text_config"]
    new = transformers.Gemma3TextConfig(**old).to_dict()
    assert "rope_scaling" in old and "rope_scaling" not in new
    assert family.architecture(old) == family.architecture(new)
    assert dict(family.architecture(new).ropes)["full_attention"].factor == 8.0


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-0.6B", "Qwen/Qwen2.5-0.5B"]
)
def test_old_and_new_dense_rope_keys_give_same_architecture(name: str) -> None:
    old = ENTRIES[name]["config"]
    new = transformers.AutoConfig.for_model(**deepcopy(old)).to_dict()
    assert "rope_theta" in old and "rope_theta" not in new
    family = family_of(old)
    assert family.architecture(old) == family.architecture(new)


@pytest.mark.parametrize(
    ("change", "kv_heads", "head_dim"),
    [({"num_key_value_heads": None}, 16, 128), ({}, 32, 128), ({"num_key_value_heads": 2}, 2, 128)],
)
def test_null_key_value_heads_equal_attention_heads(
    change: dict[str, Any], kv_heads: int, head_dim: int
) -> None:
    config = {"num_attention_heads": 16, "hidden_size": 512, **change}
    reference = transformers.Qwen3Config(**config)
    if kv_heads > 16:
        with pytest.raises(UnsupportedCheckpoint, match="does not divide 16 heads"):
            FAMILIES["qwen3"].architecture(config)
        return
    found = FAMILIES["qwen3"].architecture(config)
    assert (found.num_kv_heads, found.head_dim) == (reference.num_key_value_heads, reference.head_dim)
    assert (found.num_kv_heads, found.head_dim) == (kv_heads, head_dim)


def test_gemma4_global_kv_heads_apply_only_with_attention_k_eq_v() -> None:
    family = FAMILIES["gemma4"]
    config = {"model_type": "gemma4_text", "num_key_value_heads": 4, "num_global_key_value_heads": 2}
    assert family.architecture(config).kv_heads(5) == 4
    assert family.architecture({**config, "attention_k_eq_v": True}).kv_heads(5) == 2


@pytest.mark.parametrize(
    ("kind", "change", "key"),
    [
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        ("gemma2", {"query_pre_attn_scalar": float("inf")}, "query_pre_attn_scalar"),
        ("gemma2", {"hidden_activation": "swiglu"}, "hidden_activation"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma3_text", {"layer_types": 5}, "layer_types"),
        ("gemma3_text", {"query_pre_attn_scalar": -1}, "query_pre_attn_scalar"),
        ("gemma3_text", {"rope_parameters": [1]}, "rope_parameters"),
        ("gemma3_text", {"num_attention_heads": 0}, "num_attention_heads"),
        ("gemma4_text", {"layer_types": ["full_attention"]}, "layer_types"),
        ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
        ("gemma4_text", {"vocab_size_per_layer_input": 512}, "vocab_size_per_layer_input"),
        ("gemma4_text", {"enable_moe_block": True, "hidden_size_per_layer_input": 0}, "num_experts"),
        ("gemma4_text", {"num_kv_shared_layers": 27}, "num_kv_shared_layers"),
        ("gemma4_text", {**EXPERTS, "hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ("gemma4_text", {"final_logit_softcapping": float("nan")}, "final_logit_softcapping"),
        ("gemma4_text", {"hidden_size": "2304"}, "hidden_size"),
        ("gemma4_unified_text", {"hidden_size_per_layer_input": 256}, "hidden_size_per_layer_input"),
        ("gemma4_unified_text", {"enable_moe_block": True}, "enable_moe_block"),
        ("llama", {"hidden_act": "swiglu"}, "hidden_act"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("llama", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "rope_parameters"),
        ("llama", {"rope_parameters": {"sliding_attention": {"rope_theta": 1e4}}}, "rope_parameters"),
        ("llama", {"rope_theta": 10**400}, "rope_theta"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ("llama", {"tie_word_embeddings": "no"}, "tie_word_embeddings"),
        ("llama", {"num_key_value_heads": 5}, "num_key_value_heads"),
        ("llama", {"head_dim": 33}, "head_dim"),
        ("llama", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen2", {"use_sliding_window": "yes"}, "use_sliding_window"),
        ("qwen2", {"rope_scaling": {"type": "ntk", "factor": 4.0}}, "rope_scaling"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"] * 16}, "layer_types"),
        ("dbrx", {}, "model_type"),
        ("hunyuan_v1_dense", {"head_dim": 2, "rope_scaling": ALPHA}, "rope_scaling"),
        ("hunyuan_v1_dense", {"rope_scaling": {**ALPHA, "alpha": 1e308}}, "rope_scaling"),
        ("lfm2", {"block_ffn_dim_multiplier": 1e308}, "intermediate_size"),
        ("mistral4", {"partial_rotary_factor": 1e308}, "partial_rotary_factor"),
        ("llama", {"hidden_size": 50, "num_attention_heads": 6}, "hidden_size"),
        ("granite", {"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key_value_heads"),
        ("starcoder2", {"hidden_size": 36, "num_attention_heads": 4}, "head_dim"),
        ("mistral", {"sliding_window": 0}, "sliding_window"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": -4, "max_window_layers": 0},
            "sliding_window",
        ),
        ("cohere2", {"layer_types": ["full_attention"]}, "layer_types"),
        (
            "olmo3",
            {"num_hidden_layers": 2, "layer_types": ["full_attention", "chunked_attention"]},
            "layer_types",
        ),
        ("llama4", {"attention_chunk_size": 0}, "attention_chunk_size"),
        ("llama4_text", {"attention_chunk_size": None}, "attention_chunk_size"),
        ("llama4", {"layer_types": ["chunked_attention", "full_attention"]}, "layer_types"),
        ("llama4", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ("llama4", {"moe_layers": [0, 48]}, "moe_layers"),
        ("llama4", {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok"),
        ("llama4", {"attn_temperature_tuning": "yes"}, "attn_temperature_tuning"),
        ("llama4", {"floor_scale": 0}, "floor_scale"),
        ("qwen2", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]}, "layer_types"),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 0]}, "no_rope_layers"),
        ("smollm3", {"no_rope_layer_interval": 0}, "no_rope_layer_interval"),
        ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
        ("gemma", {"hidden_act": "swiglu"}, "hidden_act"),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ("granite", {"logits_scaling": 0}, "logits_scaling"),
        ("granite", {"residual_multiplier": math.nan}, "residual_multiplier"),
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
        ("glm4", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mixtral", {"router_jitter_noise": -0.1}, "router_jitter_noise"),
        ("olmoe", {"num_experts": 7}, "num_experts_per_tok"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
        ("glm4_moe", {"n_group": 3}, "n_group"),
        ("glm4_moe", {"n_group": 4, "topk_group": 5}, "topk_group"),
        ("glm4_moe", {"n_group": 32, "topk_group": 1}, "num_experts_per_tok"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace"),
        ("glm4_moe", {"n_shared_experts": -1}, "n_shared_experts"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fbgemm_fp8"}}, "quantization_config"),
        ("deepseek_v3", {"num_key_value_heads": 64}, "num_key_value_heads"),
        ("deepseek_v3", {"qk_rope_head_dim": 63}, "head_dim"),
        ("deepseek_v3", {"q_lora_rank": -1}, "q_lora_rank"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq"),
        ("deepseek_v3", {"rope_scaling": {"type": "linear", "mscale_all_dim": 1.0}}, "rope_scaling"),
        ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
        ("deepseek_v2", {"num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ("glm4_moe_lite", {"first_k_dense_replace": 3}, "first_k_dense_replace"),
        ("glm_moe_dsa", {"q_lora_rank": None}, "q_lora_rank"),
        ("glm_moe_dsa", {"index_topk": 0}, "index_topk"),
        ("mistral4", {"rope_parameters": {**YARN, "partial_rotary_factor": 1.0}}, "partial_rotary_factor"),
        ("qwen3_moe", {"mlp_only_layers": [24]}, "mlp_only_layers"),
        ("falcon_h1", {"mamba_n_groups": 3}, "mamba_n_groups"),
        ("falcon_h1", {"mamba_d_head": 16}, "mamba_d_ssm"),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        ("falcon_h1", {"time_step_limit": [0.1, {"__float__": "NaN"}]}, "time_step_limit"),
        ("falcon_h1", {"mamba_rms_norm": 1}, "mamba_rms_norm"),
        ("granitemoehybrid", {"layer_types": ["mamba", "mlp"]}, "layer_types"),
        ("granitemoehybrid", {"mamba_d_head": 16}, "mamba_expand"),
        ("granitemoehybrid", {"num_local_experts": -1}, "num_local_experts"),
        ("lfm2", {"full_attn_idxs": [32]}, "full_attn_idxs"),
        ("lfm2", {"layer_types": ["linear_attention"] * 32}, "layer_types"),
        ("lfm2", {"block_multiple_of": 0}, "block_multiple_of"),
        ("jamba", {"attn_layer_offset": 8}, "attn_layer_offset"),
        ("jamba", {"expert_layer_period": 0}, "expert_layer_period"),
        ("jamba", {"mamba_dt_rank": 0}, "mamba_dt_rank"),
        ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
        ("nemotron_h", {"hybrid_override_pattern": "M*X"}, "hybrid_override_pattern"),
        ("nemotron_h", {"layers_block_type": ["mamba"], "num_hidden_layers": 2}, "layers_block_type"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts"),
        ("nemotron_h", {"moe_latent_size": -1}, "moe_latent_size"),
        ("qwen3_next", {"linear_num_key_heads": 5}, "linear_num_key_heads"),
        ("qwen3_next", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("qwen3_5_moe", {"text_config": {"layer_types": ["sliding_attention"] * 40}}, "layer_types"),
        ("afmoe", {"score_func": "softmax"}, "score_func"),
        ("afmoe", {"route_norm": False}, "route_norm"),
        ("afmoe", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers"),
        ("ernie4_5_moe", {"use_bias": True}, "use_bias"),
        ("ernie4_5_moe", {"moe_layer_start_index": 28}, "moe_layer_start_index"),
        ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
        ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": -1.0}}, "alpha"),
        ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
        ("minimax_m2", {"rotary_dim": 256}, "partial_rotary_factor"),
        ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias"),
        ("olmo", {"clip_qkv": 0}, "clip_qkv"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
        ("gpt_oss", {"sliding_window": None}, "sliding_window"),
        ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_unsupported_config_is_refused_with_its_key(kind: str, change: dict[str, Any], key: str) -> None:
    config = {"model_type": kind, **change}
    with pytest.raises(UnsupportedCheckpoint) as refusal:
        family_of(config).architecture(config)
    assert refusal.value.key == key
    said = "rope" if key in ("rope_scaling", "rope_parameters") else key
    assert said in str(refusal.value)


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text"])
def test_fraction_of_a_rotary_base_is_kept(kind: str) -> None:
    full: dict[str, Any] = {"rope_theta": 1e6 + 0.5}
    full |= {"rope_type": "proportional"} if kind == "gemma4_text" else {}
    rope = {"full_attention": full, "sliding_attention": {"rope_theta": 1e4 + 0.25}}
    found: Any = family_of({"model_type": kind}).architecture({"model_type": kind, "rope_parameters": rope})
    ropes = dict(found.ropes)
    assert (ropes["full_attention"].theta, ropes["sliding_attention"].theta) == (1e6 + 0.5, 1e4 + 0.25)


def test_default_share_of_a_head_that_rotates_is_exact() -> None:
    """30 / 44 * 44 is less than 30 in floating point."""
    config = {"model_type": "mistral4", "qk_nope_head_dim": 14, "qk_rope_head_dim": 30}
    found: Any = family_of(config).architecture(config)
    assert found.turned_dim("full_attention") == 30


@pytest.mark.parametrize("kind", sorted(kind for family in FAMILIES.values() for kind in family.model_types))
def test_float32_rounded_config_values_give_same_architecture(kind: str) -> None:
    def architecture(convert: Callable[[float], float]) -> Architecture:
        full = {"rope_type": "proportional", "partial_rotary_factor": convert(0.1)}
        rope = {"rope_parameters": {"full_attention": full}} if kind.startswith("gemma4") else {}
        if isinstance(family_of({"model_type": kind}), DecoderFamily):
            rope = {"rope_scaling": {"rope_type": "linear", "factor": convert(1.1)}}
        config = {"model_type": kind, "rms_norm_eps": convert(1e-6), "rope_theta": convert(123456.7), **rope}
        return family_of(config).architecture(config)

    assert float(np.float32(1e-6)) == 9.999999974752427e-07
    assert architecture(lambda value: float(np.float32(value))) == architecture(float)


@pytest.mark.parametrize(
    ("target", "matched"),
    [
        ("q_proj", True),
        ("self_attn.q_proj", True),
        (r".*\.q_proj", True),
        (r"model\.layers\.7\..*", True),
        (r"model\.language_model\.layers\.\d+\.self_attn\.[qk]_proj", True),
        ("proj", False),
        ("k_proj", False),
        ("kv_einsum", False),
        ("[", False),
    ],
)
def test_lora_targets_match_named_projections(target: str, matched: bool) -> None:
    assert matches(target, "layers.7.self_attn.q_proj") is matched


@pytest.mark.parametrize(
    ("layers", "chosen"), [("all", (0, 1, 2, 3)), ("1-2", (1, 2)), ("0, 2-3", (0, 2, 3)), ([3, 0, 3], (0, 3))]
)
def test_parse_layers_accepts_every_form(layers: Any, chosen: tuple[int, ...]) -> None:
    assert parse_layers(layers, 4) == chosen


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("", "neither a layer nor a range"),
        ("x", "neither a layer nor a range"),
        ("2-1", "no layer is chosen"),
        ([], "no layer is chosen"),
        ("1-4", "layer 4 is not one of"),
        ([4], "layer 4 is not one of"),
        ([-1], "layer -1 is not one of"),
    ],
)
def test_parse_layers_refuses_invalid_or_missing_layers(layers: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_layers(layers, 4)


@pytest.mark.parametrize("kv", ["independent", "shared"])
@pytest.mark.parametrize("targets", [("k_proj", "v_proj"), ("v_proj",), ("q_proj", "o_proj", "down_proj")])
@pytest.mark.parametrize("name", ["recipec/tiny-gemma4", "google/gemma-3-270m", "a small llama"])
def test_adapter_in_hugging_face_layout_gives_same_delta(
    name: str, targets: tuple[str, ...], kv: str
) -> None:
    """Carry B @ A of each projection through its Source, which gives the delta of Tunix's weight."""
    config = BASES.get(name, SMALL_LLAMA)
    family = family_of(config)
    architecture = family.architecture(config)
    parameters = {p.path: p for p in family.parameters(architecture)}
    lora = LoraSettings(rank=2, alpha=4.0, targets=targets, layers=(0, 5), kv=kv, dropout=0.0)
    random = np.random.default_rng(0)
    adapters = build_adapters(family, architecture, lora)
    assert adapters
    for adapter in adapters:
        weight = parameters[adapter.target.weight]
        a = random.standard_normal(adapter.a_shape)
        b = random.standard_normal(adapter.b_shape)
        contracted = len(adapter.target.contract)
        delta = adapter.scale * np.tensordot(a, b, axes=([contracted], [0]))  # [*contracted, *rest]
        rest = [axis for axis in range(len(weight.shape)) if axis not in adapter.target.contract]
        delta = np.moveaxis(delta, range(delta.ndim), [*adapter.target.contract, *rest])
        a_hf, b_hf = adapter.to_peft(a, b)
        (source,) = weight.sources
        assert source.name == f"{adapter.name}.weight"
        expected = adapter.scale * (b_hf @ a_hf)
        expected = expected.reshape(source.reshape).transpose(source.transpose)
        np.testing.assert_allclose(delta, expected, atol=1e-9)


def test_norms_of_a_single_key_head_are_stacked_along_the_axis_of_heads() -> None:
    family = FAMILIES["stablelm"]
    config = {"model_type": "stablelm", "hidden_size": 32, "num_attention_heads": 4}
    one = family.architecture({**config, "num_key_value_heads": 1, "qk_layernorm": True})
    norm = next(p for p in family.parameters(one) if p.path.startswith("layers.0") and "k_norm" in p.path)
    assert norm.shape == (1, 8) and [source.shape for source in norm.sources] == [(8,)]
    assert norm.place(0) == (0, slice(None))
