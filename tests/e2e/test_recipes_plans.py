"""Tests of the smallest recipes in the record of plans, compiled again."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from recipec.compiler.lowering import pins
from recipec.compiler.plan import identity
from scripts import recipes
from tests.e2e.planned import compiler

NAMES = [
    pytest.param("llama32-1b-v5e1", marks=pytest.mark.e2e),
    pytest.param("llama32-1b-full-v5e4", marks=pytest.mark.nightly),
]
TIMES = 0.02
"""The relative tolerance of a time. Memory must be equal."""


@pytest.mark.parametrize("name", NAMES)
def test_recompiled_plan_matches_the_recorded_plan(name: str, tmp_path: Path) -> None:
    kept = recipes.read().recipes[name]
    program = recipes.program(recipes.FOLDER / f"{name}.yaml")
    with compiler(tmp_path):
        found = recipes.planned(program, recipes.plan(program))
    wanted = identity.versions() | {
        "libtpu": pins.sets()["train-tpu"]["transitive"]["libtpu"]
    }  # the workers'
    assert kept.versions == wanted
    assert found.key == kept.key and tuple(found.compiled_layers) == tuple(kept.compiled_layers)
    assert dataclasses.asdict(found.memory) == dataclasses.asdict(kept.memory)
    assert found.seconds == pytest.approx(kept.seconds, rel=TIMES)
    assert found.mfu == pytest.approx(kept.mfu, rel=TIMES)
    assert (found.tokens, found.micro_batches) == (kept.tokens, kept.micro_batches)
