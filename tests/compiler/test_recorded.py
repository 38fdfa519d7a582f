"""Tests that a lock's recipe is read back unchanged, and that `recipe report` makes a program of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipec.compiler.lowering.recorded import from_record, to_record
from recipec.compiler.report.run_values import resolved
from recipec.spec.language import Recipe

LOCKS = sorted((Path(__file__).parents[2] / "generated").glob("*/recipe.lock.json"))


@pytest.mark.parametrize("path", LOCKS[::4], ids=lambda path: path.parent.name)
def test_lock_recipe_reads_back_unchanged_and_compiles(path: Path) -> None:
    values = json.loads(path.read_text())["recipe"]
    assert to_record(Recipe.model_validate(from_record(values))) == values
    _, program, problem = resolved(values, str(path.parent))
    assert (problem, program is None) == ("", False)


def test_rank_pattern_keeps_its_order_in_a_record() -> None:
    patterns = {".*": 8, "q_proj": 4}
    recipe = Recipe.model_validate(
        json.loads(LOCKS[0].read_text())["recipe"]
        | {"lora": {"rank": 2, "targets": ["q_proj"], "rank_pattern": patterns}}
    )
    recorded = json.loads(json.dumps(to_record(recipe), sort_keys=True))
    read = Recipe.model_validate(from_record(recorded)).lora
    assert read is not None and list(read.rank_pattern.items()) == list(patterns.items())
