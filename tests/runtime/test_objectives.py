"""Tests that each objective is a row of the table, and that each row is complete."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import get_args

import pytest

from recipec.compiler.emitters.train import emit_train
from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.lowering.runtime_settings import SETTINGS
from recipec.compiler.roofline import training_step
from recipec.runtime.merging.model_card import training_objective
from recipec.runtime.model.partition_rules import shards
from recipec.runtime.settings import TrainSettings
from recipec.runtime.training import objectives
from recipec.runtime.training.losses import TOKEN_LOSSES
from recipec.runtime.training.preference_losses import PAIR_LOSSES
from recipec.spec.language.train import Train
from recipec.spec.load import load
from tests.emit.emitting import program_of

PREFERENCES = ["data.format=preference", "data.packing=false"]


def test_objective_table_matches_recipe_objectives_losses_and_defaults() -> None:
    names = set(get_args(Train.model_fields["objective"].annotation))
    assert names == set(objectives.OBJECTIVES)
    chosen = {
        name for row in objectives.OBJECTIVES.values() if "loss_type" in row.settings for name in row.losses
    }
    assert set(get_args(Train.model_fields["loss_type"].annotation)) == chosen
    pairs = {name for row in objectives.OBJECTIVES.values() if row.pairs for name in row.losses}
    assert pairs == set(PAIR_LOSSES)
    texts = {name for key in ("sft", "distill") for name in objectives.OBJECTIVES[key].losses}
    assert texts == {objectives.NLL, *TOKEN_LOSSES}
    keys = {
        key: field.get_default(call_default_factory=True, validated_data={})
        for key, field in Train.model_fields.items()
        if key in SETTINGS
    }
    assert keys == {key: getattr(TrainSettings, key) for key in SETTINGS}


def test_plan_script_card_and_checks_follow_objective_table_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Add a row for an objective, and check what checks, plans, scripts and cards derive from it."""
    orpo = program_of(tmp_path / "orpo", [*PREFERENCES, "train.objective=orpo"])
    flops = training_step.model_flops(orpo, 1.0)
    row = objectives.Objective(
        "another", "preference", losses={"sigmoid": ("label_smoothing",)}, reference=("sigmoid",)
    )
    monkeypatch.setitem(objectives.OBJECTIVES, "orpo", row)
    program = program_of(tmp_path / "now", [*PREFERENCES, "train.objective=orpo"])
    assert training_step.model_flops(program, 1.0) > flops
    stated = emit_train(program).partition("TRAIN = ")[2]
    assert re.findall(r"(\w+)=", stated)[:2] == ["objective", "label_smoothing"]
    assert training_objective({"objective": "orpo", "label_smoothing": 0.1}) == "another, label_smoothing 0.1"
    recipe = tmp_path / "now" / "recipe.yaml"
    without = [*PREFERENCES, "train.objective=orpo", "lora=null", "train.beta=0.3"]
    found = {one.code for one in lower(load(recipe, without)).diagnostics}
    assert "W0511" in found


def test_a_teacher_counts_in_memory_and_flops(tmp_path: Path) -> None:
    """Distill a model from itself: its weights stand on the devices twice, and it runs forward twice."""
    alone = program_of(tmp_path / "alone", [])
    teacher = f"train.distill={{teacher: {{id: {alone.recipe.model.id}}}}}"
    both = program_of(tmp_path / "both", ["train.objective=distill", teacher])
    assert both.teacher is not None
    weights = training_step.teacher_bytes(both)
    assert weights == pytest.approx(training_step.teacher_bytes(alone) + _weights(alone))
    states = [training_step.state_bytes(program) for program in (alone, both)]
    assert states[1] - states[0] == pytest.approx(weights)
    length = alone.recipe.data.max_length
    flops = [training_step.model_flops(program, 1.0) for program in (alone, both)]
    assert flops[1] - flops[0] == pytest.approx(training_step.teacher_flops(both, length))
    assert 0.3 < flops[1] / flops[0] - 1 < 0.6


def _weights(program: Program) -> float:
    """Return the bytes of the weights alone on one device, in bfloat16."""
    axes = program.recipe.mesh.axes
    split = (math.prod(shards(axis, axes) for axis in one.spec) for one in program.parameters)
    return sum(2 * math.prod(one.shape) / parts for one, parts in zip(program.parameters, split, strict=True))
