"""Tests of docs/new-choices.json: what `recipe new` chooses, against what the compiler scheduled."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.lower import lower
from recipec.spec.load import load
from scripts import new_choices

SLOWER = {"microsoft/phi-4 v6e-8": 0.25}
"""How far a recipe may be behind the fastest of its alternatives; others 5 %. docs/planning.md says why."""


@pytest.mark.parametrize("name", new_choices.names())
def test_recipe_of_new_is_the_recorded_one_and_near_the_fastest(name: str, tmp_path: Path) -> None:
    recorded = new_choices.read()[name]
    program = lower(load(new_choices.new(name, tmp_path)), planning=True).program
    assert program is not None and new_choices.chosen(program) == recorded.chosen
    assert recorded.behind <= SLOWER.get(name, 0.05)
