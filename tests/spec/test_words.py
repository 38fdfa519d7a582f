"""Tests of other tools' words: their targets exist in the language, and a help's fragments can be pasted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from recipec.spec import words
from recipec.spec.language import Recipe
from recipec.spec.structure import choices_of, field_at, paths_of_keys, section_at
from recipec.spec.validate import validate
from recipec.spec.words.tool_keys import KEYS
from recipec.spec.words.values import VALUES

GOLDEN = Path(__file__).parents[1] / "golden"
SMALLEST: dict[str, Any] = {
    "recipe": 1,
    "name": "example",
    "model": {"id": "google/gemma-4-31B-it"},
    "mesh": {"accelerator": "v5p-8", "axes": {"fsdp": 4}},
    "data": {"train": ["a.jsonl"]},
}
PATHS = {path for paths in paths_of_keys().values() for path in paths}


def given(path: str, value: Any) -> dict[str, Any]:
    """Return the smallest recipe with a value at a path, next to a mapping's existing values."""
    recipe: dict[str, Any] = json.loads(json.dumps(SMALLEST))
    *above, last = path.split(".")
    node = recipe
    for name in above:
        node = node.setdefault(name, {})
    both = isinstance(value, dict) and isinstance(node.get(last), dict)
    node[last] = {**node[last], **value} if both else value
    return recipe


def pasted(help: str, section: str) -> list[dict[str, Any]]:
    """Return the recipes from a help's fragments, pasted into a section or as their own sections."""
    made = []
    for text in re.findall(r"`(\w+: [^`]+)`", help):
        for key, value in YAML(typ="safe").load(f"{{{text}}}").items():
            inside = section_at(tuple(section.split("."))) if section else None
            path = f"{section}.{key}" if inside and key in inside.model_fields else key
            made.append(given(path, value))
    return made


def only(recipe: dict[str, Any]) -> str | None:
    """Return the help of a recipe's only diagnostic."""
    (diagnostic,) = validate(recipe).diagnostics
    return diagnostic.help


def test_keys_of_other_tools_map_to_existing_recipe_keys_or_help() -> None:
    for word, meant in KEYS.items():
        assert " " in meant or meant in PATHS or meant.startswith("mesh.axes."), word
        assert word not in PATHS and not ("." not in word and word in Recipe.model_fields), word


def test_translated_values_of_other_tools_are_not_recipe_choices() -> None:
    for path, table in VALUES.items():
        info = field_at(tuple(path.split(".")))
        assert info is not None and not set(table) & set(choices_of(info.annotation)[0]), path


def test_recipe_fragments_in_help_texts_are_valid() -> None:
    helps = {(meant, "") for meant in KEYS.values() if " " in meant}
    helps |= {(help, path.rpartition(".")[0]) for path, table in VALUES.items() for help in table.values()}
    for help, section in helps:
        for recipe in pasted(help, section):
            assert validate(recipe).diagnostics == [], help


@pytest.mark.parametrize(
    ("path", "value", "help"),
    [
        ("train.objective", "ppo", "not in this version: `objective: grpo`"),
        ("train.reward_funcs", "correct", "here it is `rewards: [{function: rewards.py:correct}"),
        ("train.optimizer.name", "lomo", "not in this version: `name: adamw`"),
        ("lora.targets", "all-linear", "remove the line: all seven projections are the default"),
        ("data.format", "alpaca", "`format: instruction`"),
        ("data.train_on_inputs", True, "`data: {loss_on: all}`"),
        ("data.streaming", True, "stream_window"),
        ("lora.quantize", "nf4", "here it is `model: {quantization: nf4}`"),
        ("lora.products", "both", "here it is `model: {quantized_matmul: both}`"),
        ("lora.layers_to_transform", [1], "did you mean `layers`?"),
        ("gradient_checkpointing", True, "`remat: {policy: none}`"),
        ("checkpoint.save_best", True, "merge.py --step best"),
        ("model", "Qwen/Qwen3-8B", "`model: {id: Qwen/Qwen3-8B}`"),
        ("mesh", "v6e-8", "`mesh: {accelerator: v6e-8, axes: {fsdp: 8}}`"),
        ("train.optimizer", "lion", "`optimizer: {name: lion}`"),
        ("lora_r", 16, "`lora: {rank: 16}`"),
        ("num_train_epochs", 3.0, "`train: {epochs: 3}`"),
        ("train.warmup_ratio", 0.1, "`train: {schedule: {warmup_ratio: 0.1}}`"),
        ("optimizer", "adamw_bnb_8bit", "`train: {optimizer: {name: adamw, learning_rate: 0.0001}}`"),
        ("load_in_4bit", True, "`model: {quantization: nf4}`"),
        ("dtype", "bf16", "`dtype` belongs to `model`, `lora` or `merge`"),
        ("train.objectiv", "sft", "did you mean `objective`?"),
        ("lora.unheard_of", 1, "its keys are rank"),
    ],
)
def test_help_explains_keys_and_values_of_other_tools(path: str, value: Any, help: str) -> None:
    assert help in (only(given(path, value)) or "")


@pytest.mark.parametrize(
    ("word", "known"),
    [("train_on_inputs", ["train"]), ("muon", ["lion"]), ("int4", ["int8"]), ("save_best", ["every_steps"])],
)
def test_slightly_similar_words_are_not_suggested_as_typos(word: str, known: list[str]) -> None:
    assert words.slip(word, known) is None


def test_every_golden_error_has_a_help() -> None:
    for path in GOLDEN.glob("*/stderr.txt"):
        blocks = re.split(r"\n\n(?=(?:error|warning|note)\[|\d+ )", path.read_text(encoding="utf-8"))
        assert all("= help: " in block for block in blocks if block.startswith("error")), path
