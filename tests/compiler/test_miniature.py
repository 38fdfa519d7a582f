"""Tests of miniature checkpoints: complete for transformers, with the original's layout, and reproducible."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler import catalog
from recipec.compiler.miniature.small_checkpoint import VOCABULARY, shrink, write_checkpoint
from recipec.compiler.miniature.small_recipe import scale_axes
from recipec.runtime.model.families import family_of

MESHES = [{"fsdp": 4, "tp": 1}, {"fsdp": 1, "tp": 4}, {"fsdp": 4, "tp": 2}]

MODELS = (
    *("google/gemma-4-31B-it", "google/gemma-4-E2B-it", "google/gemma-4-26B-A4B-it", "google/gemma-4-12B-it"),
    *("google/gemma-3-27b-it", "google/gemma-2-27b-it", "google/gemma-2b", "meta-llama/Llama-2-7b-hf"),
    *("mistralai/Ministral-3-3B-Base-2512", "microsoft/Phi-4-mini-instruct", "Qwen/Qwen2.5-7B-Instruct"),
    *(
        "Qwen/Qwen3-8B",
        "Qwen/Qwen2-VL-7B-Instruct",
        "Qwen/Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen3-VL-8B-Instruct",
        "Qwen/Qwen3-VL-30B-A3B-Instruct",
        "Qwen/Qwen3.5-0.8B-Base",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "openai/gpt-oss-20b",
    ),
    *("ibm-granite/granite-4.0-h-350m", "LiquidAI/LFM2-8B-A1B", "ai21labs/Jamba-v0.1", "zai-org/GLM-5"),
    *("nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "tiiuae/Falcon-H1-34B-Instruct", "tiiuae/falcon-7b"),
    *("unsloth/DeepSeek-V3-0324-BF16", "axolotl-ai-co/Mistral-Small-4-119B-2603-BF16", "microsoft/phi-2"),
    *("meta-llama/Llama-4-Scout-17B-16E", "HuggingFaceTB/SmolLM3-3B-Base", "EleutherAI/pythia-14m"),
    *("stabilityai/stablelm-2-1_6b", "CohereLabs/c4ai-command-r7b-12-2024", "bigcode/starcoder2-3b"),
    *("mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistral-community/pixtral-12b"),
    *("llava-hf/llava-1.5-7b-hf", "PaddlePaddle/PaddleOCR-VL"),
    *("arcee-ai/Trinity-Nano-Preview", "swiss-ai/Apertus-8B-2509", "baidu/ERNIE-4.5-21B-A3B-PT"),
)
"""Models with all kinds of layers."""


def shrunk(model: str, axes: dict[str, int]) -> dict[str, Any]:
    entry = catalog.entries()[model]
    return shrink(entry["config"], axes, multimodal=entry.get("vision", {}))


@pytest.mark.parametrize("model", MODELS)
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
    assert logits.std() > 0.9, "flat logits would hide differences"


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
    config = catalog.entries()["Qwen/Qwen3-30B-A3B-Base"]["config"] | dense
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


def test_a_config_gives_identical_checkpoint_files(tmp_path: Path) -> None:
    config = shrunk("google/gemma-4-31B-it", MESHES[0])
    for name in ("a", "b"):
        write_checkpoint(tmp_path / name, config, ["One two three.", "Four?"])
    first, second = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in ("a", "b")
    )
    assert first == second


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
