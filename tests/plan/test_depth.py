"""Tests of which layers the planner compiles for a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.lowering.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.compiler.plan.depth import Part, parts, probed
from recipec.spec.load import load

E2B = "model.id=google/gemma-4-E2B-it"
SETS: dict[str, tuple[str, ...]] = {
    "31b": (),
    "4b": ("model.id=google/gemma-3-4b-it",),
    "llama": ("model.id=meta-llama/Llama-3.1-8B-Instruct",),
    "e2b": (E2B,),
    "some": ("lora.layers=20-59",),
    "few": ("model.id=google/gemma-3-270m-it",),
    "moe": ("model.id=google/gemma-4-26B-A4B-it",),
    "jamba": ("model.id=ai21labs/AI21-Jamba-1.5-Mini",),
    "jamba-some": (
        *("model.id=ai21labs/AI21-Jamba-1.5-Mini", "lora.layers=20-31"),
        "mesh={accelerator: v5p-64, hosts: 8, axes: {fsdp: 4, tp: 8}}",
    ),
    "numbered": ("lora.targets=['layers\\.(7|9)\\.self_attn\\.q_proj']",),
}


@pytest.fixture(scope="module")
def programs(root: Path) -> dict[str, Program]:
    out = {}
    for name, sets in SETS.items():
        found = lower(load(root / "recipes" / "gemma4-31b-v5p8.yaml", ("serve=null", *sets)), True)
        assert found.program is not None, [d.message for d in found.diagnostics if d.severity == "error"]
        out[name] = found.program
    return out


@pytest.mark.parametrize(
    ("name", "few"),
    [
        ("31b", 6),
        ("4b", 6),
        ("llama", 3),
        ("e2b", 10),  # 15 layers with their own keys and values, 20 that share them: five of each
        ("some", 12),  # 20 layers without adapters, 40 with them
        ("few", 6),
        ("moe", 6),
        ("jamba", 8),
    ],
)
def test_plan_schedules_all_layers_and_compiles_each_layer_type(
    programs: dict[str, Program], name: str, few: int
) -> None:
    program = programs[name]
    whole, end = parts(program)
    every = tuple(range(program.architecture.num_layers))
    assert whole == Part(every, scheduled=True) and not end.scheduled
    assert len(end.layers) == few and set(end.layers) <= set(every)
    types = program.architecture.layer_types
    assert {types[layer] for layer in end.layers} == set(types)
    assert parts(program, exact=True) == (Part(every),)


def test_plan_compiles_all_layers_if_no_config_can_shorten_the_model(programs: dict[str, Program]) -> None:
    assert parts(programs["jamba-some"]) == (Part(tuple(range(32))),)
    assert probed(programs["jamba-some"]) == (tuple(range(32)),)


def test_lora_targets_with_layer_numbers_compile_all_layers(programs: dict[str, Program]) -> None:
    assert parts(programs["numbered"]) == (Part(tuple(range(60))),)
