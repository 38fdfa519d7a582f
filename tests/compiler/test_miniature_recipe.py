"""Tests of a rehearsal's recipe: what it keeps of the original, and how it shrinks the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.small_checkpoint import VOCABULARY, shrink, write_checkpoint
from recipec.compiler.miniature.small_recipe import LEARNING_RATE, derive, scale_axes
from recipec.compiler.rehearse.rehearse import write_miniature, write_yaml
from recipec.runtime.data.tokenizer import token_ids, with_tokens
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

BASE = {
    "recipe": 1,
    "name": "some-run",
    "model": {"id": "google/gemma-4-31B-it"},
    "mesh": {"accelerator": "v5p-8", "axes": {"fsdp": 4, "tp": 1}},
    "lora": {"rank": 64, "alpha": 32},
    "data": {"train": [{"path": "train.jsonl"}]},
    "checkpoint": {"directory": "gs://bucket/run"},
}


def program(folder: Path, recipe: dict[str, Any], name: str = "recipe.yaml") -> Program:
    write_yaml(folder / name, recipe)
    lowered = lower(load(folder / name))
    assert lowered.program is not None, render_text(lowered.diagnostics)
    return lowered.program


def miniature(folder: Path, recipe: dict[str, Any]) -> tuple[Program, dict[str, str]]:
    """Compile the miniature of a recipe, and return it with the replaced values by path."""
    original = program(folder, recipe, "original.yaml")
    config = shrink(original.config, scale_axes(original.recipe.mesh.axes))
    write_checkpoint(folder / "model", config)
    small, replaced = derive(original, config, "./model", "train.jsonl", "eval.jsonl", 8)
    return program(folder, small), {change.path: change.after for change in replaced}


def test_settings_independent_of_size_stay_unchanged(tmp_path: Path) -> None:
    extra = {
        "data": BASE["data"] | {"eval_fraction": 0.1, "eval_seed": 3},
        "remat": {"policy": "block"},
        "train": {"loss_normalization": "micro_batches", "seed": 7, "global_batch_size": 8},
        "merge": {"dtype": "float32", "adapter": False},
    }
    small, replaced = miniature(tmp_path, BASE | extra)
    recipe = small.recipe
    assert recipe.lora is not None
    assert (recipe.lora.rank, recipe.lora.alpha) == (64, 32)
    assert recipe.remat.policy == "block"
    assert (recipe.data.eval_fraction, recipe.data.eval_seed, recipe.data.eval) == (0.1, 3, [])
    assert (recipe.train.loss_normalization, recipe.train.seed) == ("micro_batches", 7)
    assert (recipe.merge.dtype, recipe.merge.adapter) == ("float32", False)
    assert small.accumulation_steps == 2
    assert recipe.mesh.axes == {"fsdp": 4, "tp": 1}
    assert not {path for path in replaced if path.startswith(("lora", "remat", "merge"))}


def test_large_meshes_and_batches_shrink_together(tmp_path: Path) -> None:
    extra = {
        "mesh": {"accelerator": "v5e-8", "axes": {"fsdp": 8, "tp": 1}},
        "train": {"global_batch_size": 512, "micro_batch_size": 8},
    }
    small, replaced = miniature(tmp_path, BASE | extra)
    assert small.recipe.mesh.accelerator == "cpu-8"
    assert small.accumulation_steps == 2
    assert small.recipe.train.global_batch_size == 32
    assert replaced["train.optimizer.learning_rate"] == str(LEARNING_RATE)


def test_rewards_and_lengths_of_reinforcement_learning_fit_the_miniature(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text("def right(completions, answer, **columns):\n    return []\n")
    grpo = {"num_generations": 12, "iterations": 3, "max_prompt_length": 300, "max_completion_length": 700}
    grpo |= {"stop": ["</answer>"], "overlong_penalty": 200, "dynamic_sampling": 1}
    extra = {
        "mesh": {"accelerator": "v6e-8", "axes": {"fsdp": 8, "tp": 1}},
        "data": {"train": [{"path": "gs://bucket/prompts.jsonl"}], "format": "prompt", "overlong": "error"},
        "train": {"objective": "grpo", "steps": 9, "global_batch_size": 48, "grpo": grpo},
        "rewards": [{"function": "rewards.py:right"}, {"numeric_match": {"column": "answer"}, "weight": 0.5}],
        "rollout": {"axes": {"fsdp": 1, "tp": 8}, "rows": 16},
    }
    small, replaced = miniature(tmp_path, BASE | {"model": {"id": "Qwen/Qwen3-8B"}} | extra)
    recipe = small.recipe
    assert recipe.train.grpo is not None
    assert (recipe.train.global_batch_size, recipe.train.grpo.num_generations) == (16, 8)
    assert (recipe.train.grpo.overlong_penalty, recipe.train.grpo.dynamic_sampling) == (16, 1)
    assert recipe.data.max_length == 96 + 16
    assert replaced["rewards"] == "format_match"
    assert replaced["train.grpo.stop"] == "none"


def test_qat_group_size_divides_the_miniature_inputs(tmp_path: Path) -> None:
    qat = {"group_size": 256, "start_step": 1000}
    small, replaced = miniature(tmp_path, BASE | {"train": {"steps": 2000, "qat": qat}})
    found = small.recipe.train.qat
    assert found is not None and found.start_step == 1 and 2 <= found.group_size < 256
    shapes = {parameter.path: parameter.shape for parameter in small.parameters}
    for adapter in small.adapters:
        inputs = [shapes[adapter.target.weight][axis] for axis in adapter.target.contract]
        assert math.prod(inputs) % found.group_size == 0
    assert {"train.qat.group_size", "train.qat.start_step"} <= replaced.keys()


@pytest.mark.parametrize(
    ("layers", "small_layers"),
    [("20-59", [2, 3, 4, 5]), ([54], [4]), ([0, 30], [0, 3]), ("0-59", list(range(6)))],
)
def test_lora_layers_are_mapped_to_miniature_layers(
    tmp_path: Path, layers: str | list[int], small_layers: list[int]
) -> None:
    small, _ = miniature(tmp_path, BASE | {"lora": {"rank": 8, "layers": layers}})
    assert small.recipe.lora is not None
    assert small.recipe.lora.layers == small_layers


def test_target_regex_of_absent_layers_becomes_projection_names(tmp_path: Path) -> None:
    targets = ["o_proj", r"layers\.(2|41)\.self_attn\.q_proj", r"layers\.4[0-9]\.mlp\.(up|down)_proj"]
    small, replaced = miniature(tmp_path, BASE | {"lora": {"rank": 8, "targets": targets}})
    assert small.recipe.lora is not None
    assert small.recipe.lora.targets == ["o_proj", targets[1], "down_proj", "up_proj"]
    assert "lora.targets" in replaced


def test_sharding_rules_for_absent_layers_are_left_out(tmp_path: Path) -> None:
    rules = [
        {"match": r"layers\.40\.attn\.q_proj\.w", "spec": ["fsdp", None, None]},
        {"match": r".*mlp\.up_proj.*", "spec": [None, "fsdp"]},
    ]
    small, _ = miniature(tmp_path, BASE | {"sharding": {"rules": rules}})
    assert small.rules == ((r".*mlp\.up_proj.*", (None, "fsdp")),)


def test_splash_attention_becomes_dot_attention(tmp_path: Path) -> None:
    extra = {
        "model": {"id": "google/gemma-4-31B-it", "attention": "splash"},
        "data": BASE["data"] | {"packing": False},
    }
    original = program(tmp_path, BASE | extra, "probe.yaml")
    assert original.recipe.model.attention == "splash"
    small, replaced = miniature(tmp_path, BASE | extra)
    assert small.recipe.model.attention == replaced["model.attention"] == "dot"


def test_rehearsal_data_has_the_column_names_of_the_recipe(tmp_path: Path) -> None:
    fields = {"messages": "conversations", "role": "from", "content": "value"}
    write_miniature(program(tmp_path, BASE | {"data": BASE["data"] | {"fields": fields}}), tmp_path)
    row = json.loads((tmp_path / "rehearsal-train.jsonl").read_text().splitlines()[0])
    assert row.keys() == {"conversations"}
    assert all(message.keys() == {"from", "value"} for message in row["conversations"])


def test_miniatures_tokenizer_has_the_tokens_that_new_ones_replace(tmp_path: Path) -> None:
    tokens = {"<tool>": "<unused5>", **dict.fromkeys(f"<{n}>" for n in range(20))}
    write_miniature(
        program(tmp_path, BASE | {"model": {"id": "google/gemma-4-31B-it", "add_tokens": tokens}}), tmp_path
    )
    files = {file.name: file.read_bytes() for file in (tmp_path / "model").glob("*.json")}
    made = json.loads(with_tokens(files, tokens, VOCABULARY, "model")["tokenizer.json"])
    assert tokens.keys() <= token_ids(made).keys()
