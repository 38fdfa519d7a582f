"""Tests of an artifact's recipe.yaml: the user's own file if it is complete, and never the defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from emitting import RECIPE, compiled, files_of, program_of

from recipec.spec.load import load
from recipec.spec.recipe_text import HEAD, to_yaml


def test_single_file_recipe_is_copied_verbatim_below_the_header(tmp_path: Path) -> None:
    assert files_of(tmp_path)["recipe.yaml"].decode() == f"{HEAD}\n{RECIPE}"


def test_recipe_line_endings_become_lf(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_bytes(RECIPE.rstrip("\n").replace("\n", "\r\n").encode())
    assert compiled(tmp_path / "recipe.yaml").text == f"{HEAD}\n{RECIPE}"


def test_schema_comment_is_replaced_by_the_artifact_schema_path(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    rest = "# A reason.\n" + RECIPE + "# yaml-language-server: $schema=said/below.json\n"
    path.write_text(f"# yaml-language-server: $schema=../docs/recipe.schema.json\n{rest}", encoding="utf-8")
    text = compiled(path).text
    assert text == f"{HEAD}\n{rest}"
    path.write_text(text, encoding="utf-8")
    assert compiled(path).text == text


def test_set_and_extends_are_merged_in_without_the_defaults(tmp_path: Path) -> None:
    program_of(tmp_path, text=RECIPE)
    (tmp_path / "base.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "child.yaml").write_text(
        "recipe: 1\nname: child\nextends: base.yaml\nlora: {alpha: 8}\n"
        "train:\n  optimizer: {learning_rate: 2.0e-5}\n",
        encoding="utf-8",
    )
    text = compiled(tmp_path / "child.yaml", ["model.tokenizer=google/gemma-4-31B-it"]).text
    assert text == (
        f"{HEAD}\n"
        "# Made by recipec from a recipe with `extends` or `--set`.\n"
        "recipe: 1\n"
        "name: child\n"
        "model:\n  id: google/gemma-4-31B-it\n  tokenizer: google/gemma-4-31B-it\n"
        "mesh:\n  accelerator: v5p-8\n  axes: {fsdp: 4, tp: 1}\n"
        "lora:\n  rank: 16\n  alpha: 8\n"
        "data:\n  train: [{path: data/train.jsonl}]\n"
        "serve:\n  accelerator: v6e-8\n"
        "train:\n  optimizer: {learning_rate: 2.0e-05}\n"
    )
    (tmp_path / "whole.yaml").write_text(text, encoding="utf-8")
    assert compiled(tmp_path / "whole.yaml").recipe.model_dump() == compiled(
        tmp_path / "child.yaml", ["model.tokenizer=google/gemma-4-31B-it"]
    ).recipe.model_dump(exclude={"extends"}) | {"extends": None}


VALUES: list[Any] = [
    dict(zip("abcdefghi", ["yes", "null", "1e3", "0x1F", "", "~", "a: b", "# no", "- x"], strict=True)),
    {"text": "line one\nline two\n", "quotes": 'it\'s "so"', "wide": "ü 語 🙂", "escape": "\\d\t\x07"},
    {"numbers": [1, -2, 0.1, 1e-08, 1e22, 1.0], "flags": [True, False, None], "empty": [{}, []]},
    {"long": [f"item number {i} with some words" for i in range(9)], "deep": {"a": {"b": {"c": ["d" * 99]}}}},
    {
        "key with space": 1,
        "on": {"n": 2},
        "a.b": "x,y",
        "braces": "{a}",
        "brackets": "[a]",
        "star": "*a",
        "and": "&a",
    },
]


@pytest.mark.parametrize("values", VALUES, ids=range(len(VALUES)))
def test_to_yaml_output_reads_back_equal(values: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(to_yaml(values), encoding="utf-8")
    raw = load(path).raw
    assert json.dumps(raw, sort_keys=True) == json.dumps(values, sort_keys=True)
    from ruamel.yaml import YAML

    assert YAML(typ="safe", pure=True).load(path) == values
