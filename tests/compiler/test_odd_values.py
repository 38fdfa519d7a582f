"""Tests that any recipe gives a program or diagnostics, and never an exception."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from recipec.compiler.explain.explain import explain, leaves
from recipec.compiler.lower import lower
from recipec.compiler.pages.text import write
from recipec.spec.key_paths import join
from recipec.spec.load import load

RECIPE = """\
recipe: 1
name: example
model: {id: recipec/tiny-gemma4}
mesh: {accelerator: cpu-8, axes: {fsdp: 4, tp: 2}}
lora: {rank: 8}
sharding: {rules: [{match: ".*down_proj.*", spec: [tp, fsdp]}]}
data: {train: [train.jsonl], eval: [eval.jsonl], fields: {messages: conversation}}
serve: {extra_args: {seed: 1}, env: {A: b}, tensor_parallel_size: 2}
"""

ODD = [
    *("null", "0", "-1", "7", "1000000000", ".nan", '""', "x", '"../x"', "~", "[]", "{}", "true"),
    *('"("', '"."', "v5p-8", "cpu-1", "9" * 30),
]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    (tmp_path / "train.jsonl").write_text('{"conversation": [1, 2]}\nnot json\n[]\n"x"\n')
    return path


def keys(path: Path) -> list[str]:
    recipe = load(path).recipe
    assert recipe is not None
    return [join(parts) for parts, _ in leaves(recipe)]


def assert_answered(path: Path, sets: Sequence[str]) -> None:
    loaded = load(path, sets)
    lowered = lower(loaded)
    if lowered.program is not None:
        write(explain(lowered.program, loaded))
    else:
        assert any(d.severity == "error" for d in lowered.diagnostics)


def test_an_odd_value_for_each_key_raises_no_exception(recipe: Path) -> None:
    """Try one value for every key, drawn by the key's name, so that it is the same each time."""
    tried = {key: Random(key).choice(ODD) for key in keys(recipe)}
    assert {*tried.values()} == set(ODD)
    for key, value in tried.items():
        assert_answered(recipe, [f"{key}={value}"])


@pytest.mark.parametrize(
    "key",
    [
        "lora.targets=[{}]",
        "lora.modules_to_save=[{}]",
        "lora.rank_pattern={{{}: 4}}",
        "train.trainable_modules=[{}]",
        "sharding.rules=[{{match: {}, spec: [fsdp]}}]",
    ],
)
def test_regular_expressions_that_python_cannot_hold_raise_no_exception(key: str, recipe: Path) -> None:
    for pattern in (f"a{{{'9' * 20}}}", "(" * 3000):
        given = load(recipe, [key.format(f'"{pattern}"')])
        assert any(d.severity == "error" for d in lower(given).diagnostics)


@pytest.mark.nightly
@pytest.mark.parametrize("value", ODD)
def test_each_odd_value_for_every_key_raises_no_exception(value: str, recipe: Path) -> None:
    for key in keys(recipe):
        assert_answered(recipe, [f"{key}={value}"])
