"""Tests of the budget: what exceeds it, what fits in it, and what is unknown."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipec.compiler.plan.plan_session import E1002, E1003, E1004, W1005, check_budget
from recipec.compiler.plan.results import Plan
from recipec.spec.diagnostics import Diagnostic
from tests.plan import plans

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 64}
data: {train: [gs://bucket/train.jsonl]}
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def found(recipe: Path, plan: Plan, *sets: str) -> list[Diagnostic]:
    return check_budget(plans.lowered(recipe, *(f"budget.{item}" for item in sets)), plan)


def test_plan_without_a_budget_has_no_diagnostics(recipe: Path) -> None:
    assert found(recipe, plans.too_large()) == []


def test_plan_within_the_budget_has_no_diagnostics(recipe: Path) -> None:
    assert found(recipe, plans.flagship(), "max_hbm_share=0.77", "max_hours=0.28", "max_usd=4.67") == []


def test_plan_above_every_limit_gives_E1002_E1003_and_E1004(recipe: Path) -> None:
    assert found(recipe, plans.flagship(), "max_hbm_share=0.7", "max_hours=0.25", "max_usd=4") == [
        Diagnostic(
            E1002,
            "the step takes an estimated 76.3 % of each device's HBM, and budget.max_hbm_share allows 70.0 %",
            "budget.max_hbm_share",
            "it takes 72.50 of 95.00 GiB, 6.00 GiB too much: lower train.micro_batch_size, choose a "
            "remat.policy that stores less, or allow more",
        ),
        Diagnostic(
            E1003,
            "the run takes an estimated 0.28 hours, and budget.max_hours allows 0.25",
            "budget.max_hours",
            "with the known errors of such estimates it is 0.25 to 0.33 hours; `recipe plan --search` looks "
            "for a "
            "faster configuration",
        ),
        Diagnostic(
            E1004,
            "the run costs an estimated US$ 4.67, and budget.max_usd allows 4",
            "budget.max_usd",
            "with the known errors of such estimates it is US$ 4.20 to 5.60; `recipe plan --search` looks "
            "for a "
            "cheaper configuration",
        ),
    ]


def test_small_overrun_is_printed_with_enough_digits(recipe: Path) -> None:
    plan = plans.flagship()
    run = replace(plan.run, hours=0.2500001, usd=4.001)
    memory = replace(plan.estimate.memory, temporaries=plan.estimate.memory.temporaries + 1e6)
    above = replace(plan, run=run, estimate=replace(plan.estimate, memory=memory))
    share = plan.estimate.memory.share
    hbm, hours, usd = found(recipe, above, f"max_hbm_share={share!r}", "max_hours=0.25", "max_usd=4")
    assert "takes an estimated 76.32 % of" in hbm.message
    assert hbm.help is not None and "GiB, less than 0.01 GiB too much" in hbm.help
    assert hours.message == "the run takes an estimated 0.2500001 hours, and budget.max_hours allows 0.25"
    assert usd.message == "the run costs an estimated US$ 4.001, and budget.max_usd allows 4"


def test_run_of_unknown_length_leaves_hours_and_cost_unchecked(recipe: Path) -> None:
    hours, usd = found(recipe, plans.unknown_length(), "max_hbm_share=0.9", "max_hours=1", "max_usd=10")
    assert hours == Diagnostic(
        W1005,
        "budget.max_hours cannot be checked: the length of the run is not known",
        "budget.max_hours",
        "give train.steps, or put the data next to the recipe and give its tokenizer's folder with --model",
    )
    assert (usd.code, usd.path) == ("W1005", "budget.max_usd")


def test_upper_bound_above_the_budget_leaves_hours_and_cost_unchecked(recipe: Path) -> None:
    flagship = plans.flagship()
    bound = replace(flagship, run=replace(flagship.run, source="bound", hours=2.0, usd=30.0, steps=500))
    assert found(recipe, bound, "max_hours=2", "max_usd=30") == []
    hours, usd = found(recipe, bound, "max_hours=1", "max_usd=10")
    assert (hours.code, usd.code) == ("W1005", "W1005")
    assert hours.message == (
        "budget.max_hours cannot be checked: the run has at most 500 steps, which are above the limit, but "
        "may have fewer"
    )


def test_machine_without_a_price_leaves_the_cost_unchecked(recipe: Path) -> None:
    assert found(recipe, plans.unpriced(), "max_hours=1", "max_usd=10") == [
        Diagnostic(
            W1005,
            "budget.max_usd cannot be checked: v5p-8 has no list price",
            "budget.max_usd",
            "give the whole machine's price as cost.train_usd_per_hour",
        )
    ]


def test_refused_step_exceeds_memory_and_leaves_hours_unchecked(recipe: Path) -> None:
    refused = plans.refused()
    refused = replace(refused, run=replace(refused.run, steps=774))
    memory, hours = found(recipe, refused, "max_hbm_share=1", "max_hours=1")
    assert memory.message.startswith("the step takes an estimated 135.5 % of each device's HBM")
    assert hours.message == (
        "budget.max_hours cannot be checked: the step does not fit, so its time is not known"
    )
