"""Tests of the positions of models, and of the lengths that are held against them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

from recipec.compiler import catalog
from recipec.compiler.catalog import listing
from recipec.compiler.lower import Lowered, lower
from recipec.spec.load import load
from scripts import causal_models
from scripts import positions as record

LLAMA: dict[str, Any] = {"model_type": "llama", "max_position_embeddings": 8192}
BEFORE = {"original_max_position_embeddings": 2048}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LISTS = {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
LAYERS = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 2.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}

CASES: tuple[tuple[str, dict[str, Any], int | None], ...] = (
    ("plain", LLAMA, 8192),
    ("linear", {**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}, 16_384),
    ("dynamic", {**LLAMA, "rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 32_768),
    ("llama3", {**LLAMA, "rope_scaling": {"rope_type": "llama3", "factor": 4.0, **BANDS, **BEFORE}}, 8192),
    ("yarn", {**LLAMA, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, **BEFORE}}, 8192),
    ("longrope", {**LLAMA, "rope_scaling": {"type": "su", "factor": 4.0, **LISTS, **BEFORE}}, 8192),
    ("null factor", {**LLAMA, "rope_parameters": {"rope_type": "default", "factor": None}}, 8192),
    (
        "layers of two kinds",
        {"model_type": "gemma4_text", "max_position_embeddings": 8192, "rope_parameters": LAYERS},
        16_384,
    ),
    (
        "Gemma 3, whose number is scaled already",
        {
            "model_type": "gemma3",
            "text_config": {
                "model_type": "gemma3_text",
                "max_position_embeddings": 131_072,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
        },
        131_072,
    ),
    ("transformers' default", {"model_type": "qwen3"}, 32_768),
    (
        "transformers' default of a text part",
        {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
        131_072,
    ),
    ("the smallest of several keys", {**LLAMA, "max_seq_len": 4096}, 4096),
    ("Cohere's own key", {**LLAMA, "model_max_length": 131_072}, 131_072),
    ("no key, and an unknown type", {"model_type": "unheard-of"}, None),
    ("no number", {"model_type": "llama", "max_position_embeddings": "many"}, 2048),
)
"""Contents of a config.json, and the positions. tests/e2e/test_vllm_positions.py asks vLLM itself."""


def of(config: Mapping[str, Any], origin: str = "config.json") -> int | None:
    model = catalog.find("Qwen/Qwen3-8B", Path())
    return replace(model, config=config, origin=origin).positions()


@pytest.mark.parametrize(("config", "most"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_positions_follow_vllms_rule(config: dict[str, Any], most: int | None) -> None:
    assert of(config) == most


def test_catalog_has_the_recorded_positions_and_says_nothing_of_the_others() -> None:
    data = json.loads(listing.DATA.read_text(encoding="utf-8"))
    assert record.written(json.loads(json.dumps(data)), record.read()) == data
    found = {name: catalog.find(name, Path()).positions() for name in catalog.entries()}
    assert len(found) - list(found.values()).count(None) >= 375
    for name, number in record.read().items():
        scaled = name.startswith("tencent/")
        assert found[name] == number or scaled, name
    # A fine-tune of a model does not inherit what only a copy of that model's file confirms.
    assert found["HuggingFaceTB/SmolLM2-360M"] == 8192 and found["loubnabnl/smollm2-360M-sft"] is None


def test_defaults_are_those_of_transformers() -> None:
    known = causal_models.positions(transformers, catalog.causal_models())
    assert dict(listing.default_positions()) == known
    assert known["llama"] == 2048 and known["gemma3_text"] == 131_072


RECIPE = """\
recipe: 1
name: example
model: {id: MODEL}
mesh: {accelerator: v6e-8, axes: {fsdp: 8, tp: 1}}
lora: {rank: 16}
data: {train: [gs://bucket/train.jsonl], format: text}
serve: {accelerator: v6e-8, tensor_parallel_size: 8}
"""


def lowered(folder: Path, model: str, *sets: str) -> Lowered:
    return lower(load(folder / "recipe.yaml", sets, text=RECIPE.replace("MODEL", model)))


def worse(found: Lowered) -> dict[str, str | None]:
    return {d.code: d.help for d in found.diagnostics if d.severity != "note"}


def test_default_lengths_are_shortened_to_the_positions(tmp_path: Path) -> None:
    program = lowered(tmp_path, "google/gemma-2-9b-it").program
    assert program is not None and program.recipe.server.max_model_len == 8192
    program = lowered(tmp_path, "microsoft/phi-2").program
    assert program is not None and program.recipe.server.max_model_len == 2048
    assert program.recipe.data.max_length == 2048
    program = lowered(tmp_path, "Qwen/Qwen3-8B").program
    assert program is not None and program.recipe.server.max_model_len == 16_384


def test_helps_propose_lengths_that_the_model_has(tmp_path: Path) -> None:
    """Follow each help to a recipe without findings."""
    long = ("data.max_length=65536", "serve.max_model_len=32768")
    found = worse(lowered(tmp_path, "Qwen/Qwen3-8B", *long))
    assert found["W0822"] == "max_length: 40960"
    assert found["W0617"] == "max_model_len: 40960, and data: {max_length: 40960}"
    followed = ("data.max_length=40960", "serve.max_model_len=40960")
    assert not worse(lowered(tmp_path, "Qwen/Qwen3-8B", *followed))
    found = worse(lowered(tmp_path, "Qwen/Qwen3-8B", "data.max_length=40960", "serve.max_model_len=65536"))
    assert found == {"E0666": "max_model_len: 40960"}
    lengths = ("serve.max_model_len=1024", "data.max_length=512", "serve.max_num_batched_tokens=1024")
    answers = ("benchmark.input_lengths=[2048]", "benchmark.output_length=1024")
    assert worse(lowered(tmp_path, "microsoft/phi-2", *lengths, *answers))["W0640"] == "output_length: 512"


def test_flags_that_change_the_positions_are_counted(tmp_path: Path) -> None:
    long = "serve.max_model_len=16384"
    model = "meta-llama/Meta-Llama-3-8B-Instruct"
    assert worse(lowered(tmp_path, model, long)) == {"E0666": "max_model_len: 8192"}
    scaled = "serve.extra_args={hf_overrides: {rope_scaling: {rope_type: linear, factor: 2.0}}}"
    assert not worse(lowered(tmp_path, model, long, scaled))
    dotted = "serve.extra_args={hf_overrides.max_position_embeddings: 16384}"
    assert not worse(lowered(tmp_path, model, long, dotted))
    other = "serve.extra_args={hf_config_path: /other}"
    assert not worse(lowered(tmp_path, model, long, other))
    permitted = 'serve.env={VLLM_ALLOW_LONG_MAX_MODEL_LEN: "1"}'
    assert worse(lowered(tmp_path, model, long, permitted)) == {"W0666": "max_model_len: 8192"}
    window = "serve.extra_args={disable_sliding_window: true}"
    assert "E0666" not in worse(lowered(tmp_path, "mistralai/Mistral-7B-v0.1", "serve.max_model_len=8192"))
    assert "E0666" in worse(
        lowered(tmp_path, "mistralai/Mistral-7B-v0.1", "serve.max_model_len=8192", window)
    )


def test_positions_of_a_directory_come_from_its_config(tmp_path: Path) -> None:
    config = {**catalog.entries()["Qwen/Qwen3-8B"]["config"], "max_position_embeddings": 4096}
    (tmp_path / "checkpoint").mkdir()
    file = tmp_path / "checkpoint" / "config.json"
    file.write_text(json.dumps(config))
    assert "E0666" in worse(lowered(tmp_path, "./checkpoint", "serve.max_model_len=8192"))
    del config["max_position_embeddings"]  # transformers' own then
    file.write_text(json.dumps(config))
    assert "E0666" not in worse(lowered(tmp_path, "./checkpoint", "serve.max_model_len=32768"))
    assert "E0666" in worse(lowered(tmp_path, "./checkpoint", "serve.max_model_len=32769"))
