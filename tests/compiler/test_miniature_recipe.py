"""Tests of a rehearsal's recipe: what it keeps of the original, and how it shrinks the rest."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from recipec.compiler.explain.preview import preview
from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.miniature.small_checkpoint import VOCABULARY, shrink, write_checkpoint
from recipec.compiler.miniature.small_recipe import LEARNING_RATE, LENGTH, PROMPT_LENGTH, derive, scale_axes
from recipec.compiler.rehearse.rehearse import TRAIN_ROWS, write_miniature, write_recipe, write_yaml
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
    small, replaced = derive(original, config, "train.jsonl", "eval.jsonl", 8)
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


OBJECTIVES: dict[str, dict[str, Any]] = {
    "sft": {"data": {"format": "chat"}},
    "dpo": {"data": {"format": "preference"}},
    "cpo": {"data": {"format": "preference"}},
    "kto": {"data": {"format": "unpaired_preference"}, "train": {"micro_batch_size": 2}},
    "distill": {
        "data": {"format": "chat"},
        "train": {"distill": {"teacher": {"id": "Qwen/Qwen3-1.7B"}, "lmbda": 0.5}},
    },
    "grpo": {"data": {"format": "prompt"}, "rewards": [{"numeric_match": {"column": "answer"}}]},
}
"""Keys of a recipe with each objective."""


def rehearsed(folder: Path, recipe: dict[str, Any]) -> Program:
    """Compile a recipe's miniature as `recipe rehearse` does."""
    original = program(folder, recipe, "original.yaml")
    work = folder / "work"
    work.mkdir()
    write_miniature(original, work)
    write_recipe(original, 4, work)
    return program(work, json.loads(json.dumps(YAML(typ="safe").load(work / "recipe.yaml"))))


def with_objective(objective: str, model: str = "Qwen/Qwen3-0.6B", **data: Any) -> dict[str, Any]:
    keys = OBJECTIVES[objective]
    return BASE | {
        "model": {"id": model},
        "data": {"train": [{"path": "gs://bucket/rows.jsonl"}]} | keys["data"] | data,
        "train": {"objective": objective, "steps": 100, "global_batch_size": 32} | keys.get("train", {}),
        **({"rewards": keys["rewards"]} if "rewards" in keys else {}),
    }


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["full", "lora"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_recipe_that_leaves_its_keys_to_their_defaults_has_a_valid_miniature(
    tmp_path: Path, objective: str, lora: dict[str, int] | None
) -> None:
    small = rehearsed(tmp_path, with_objective(objective) | {"lora": lora}).recipe
    assert small.train.objective == objective
    assert (small.lora is None) == (lora is None)
    assert "adapter" not in small.merge.model_fields_set


def test_a_key_of_the_recipe_stays_in_its_miniature_even_with_the_default_value(tmp_path: Path) -> None:
    recipe = with_objective("sft") | {"merge": {"adapter": True, "output": "model"}}
    small = rehearsed(tmp_path, recipe).recipe
    assert small.merge.model_fields_set == {"adapter", "output"}
    assert small.lora is not None and small.lora.alpha == 32


@pytest.mark.parametrize("model", ["microsoft/phi-4", "tencent/Hunyuan-0.5B-Instruct", "Qwen/Qwen3-0.6B"])
def test_a_prompt_and_its_completion_fit_the_context_of_each_miniature(tmp_path: Path, model: str) -> None:
    small = rehearsed(tmp_path, with_objective("grpo", model)).recipe
    assert small.train.grpo is not None and small.train.grpo.max_completion_length == 16


SYSTEM = (
    "You answer questions about travel. First think about the route, the season and the traveler's budget, "
    "between <think> and </think>. Then write the answer between <answer> and </answer>. Name every ticket "
    "that has to be bought in advance, and never promise a connection of less than twenty minutes."
)
TEMPLATE = (
    "{{ '" + SYSTEM.replace("'", "\\'") + "\n' }}{% for message in messages %}"
    "{{ message.role + ': ' + message.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: <think>' }}{% endif %}"
)


@pytest.mark.parametrize(("objective", "template"), [("sft", TEMPLATE), ("grpo", "long.jinja")])
def test_rows_fit_the_miniature_with_a_long_chat_template(
    tmp_path: Path, objective: str, template: str
) -> None:
    (tmp_path / "long.jinja").write_text(TEMPLATE, encoding="utf-8")
    recipe = with_objective(objective, "allenai/Olmo-3-1025-7B", chat_template=template, overlong="drop")
    data = preview(rehearsed(tmp_path, recipe), 0, "train")
    assert data.problem is None
    assert (data.report.kept, data.report.read) == (TRAIN_ROWS, TRAIN_ROWS)
    assert data.report.longest > max(LENGTH, PROMPT_LENGTH)  # as long as no row without the template
