"""Test maps of hyperparameters whose values are all texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.lowering.hardware import from_name
from recipec.compiler.port.port import Asked, port
from recipec.compiler.port.typed import typed
from tests.port.dialects import source

GIVEN = {"learning_rate": "3e-4", "bf16": "True", "max_steps": "12", "model_name_or_path": "Qwen/Qwen3-8B"}
READ = {"learning_rate": 3e-4, "bf16": True, "max_steps": 12, "model_name_or_path": "Qwen/Qwen3-8B"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (GIVEN, READ),
        ({key: json.dumps(value) for key, value in GIVEN.items()}, READ),
        ({"HyperParameters": GIVEN, "RoleArn": "r"}, {"RoleArn": "r", **READ}),
        (
            {"lr_scheduler_kwargs": '{"min_lr_rate": 0.1}', "bf16": "no"},
            {"lr_scheduler_kwargs": {"min_lr_rate": 0.1}, "bf16": False},
        ),
        ({"bf16": "maybe", "max_steps": "many"}, {"bf16": "maybe", "max_steps": "many"}),
        ({**GIVEN, "seed": 3}, {**GIVEN, "seed": 3}),
        ({"path": "3", "seed": "3"}, {"path": "3", "seed": "3"}),
    ],
)
def test_text_hyperparameters_are_parsed_by_argument_type(
    given: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    made = typed(source(tmp_path, "hyperparameters.json", given))
    assert made.data == expected
    assert made.span("bf16") is None or made.span("bf16").line > 0  # type: ignore[union-attr]


def test_sagemaker_job_file_is_ported_with_key_positions(tmp_path: Path) -> None:
    file = tmp_path / "job.json"
    given = {
        **GIVEN,
        "dataset_name": "a/b",
        "use_peft": "true",
        "max_length": "512",
        "sagemaker_program": "sft.py",
    }
    file.write_text(json.dumps({"HyperParameters": given}, indent=1), encoding="utf-8")
    made = port([file], Asked(from_name("v5p-8"), None, place=tmp_path / "recipe.yaml", script="sft"))
    assert made.whole and made.title == "TRL"
    rows = {row.key: row for row in made.rows}
    assert (rows["learning_rate"].line, rows["sagemaker_program"].verdict.value) == (3, "exact")
    assert "learning_rate: 0.0003" in made.text and "steps: 12" in made.text
