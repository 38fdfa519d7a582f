"""Fixtures that load and lower a short version of the Gemma 4 31B recipe with changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from recipec.compiler.lower import Lowered, lower
from recipec.spec.load import Loaded, load

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 64}
data: {train: [gs://bucket/train.jsonl]}
"""

Lower = Callable[..., Lowered]


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def loaded(recipe_file: Path) -> Callable[..., Loaded]:
    """Return a function that loads the recipe with `--set` arguments."""
    return lambda *sets: load(recipe_file, sets)


@pytest.fixture
def lowered(recipe_file: Path) -> Lower:
    """Return a function that lowers the recipe with `--set` arguments."""
    return lambda *sets: lower(load(recipe_file, sets))


@pytest.fixture
def codes(lowered: Lower) -> Callable[..., set[str]]:
    """Return a function that gives the codes of the recipe's diagnostics."""
    return lambda *sets: {diagnostic.code for diagnostic in lowered(*sets).diagnostics}
