"""Tests of `recipe cost`: the published run to the cent, and the sources of the figures."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from recipec.compiler.errors import ArtifactError
from recipec.compiler.explain.cost import COST, cost, document
from recipec.compiler.lowering.program import Program
from recipec.compiler.pages import text
from recipec.compiler.plan.results import Interval, RunLength
from recipec.compiler.plan.run_hours import Hours, measured_hours, training_hours
from tests.emit.emitting import program_of

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 64}
data: {train: [gs://bucket/train.jsonl]}
serve: {accelerator: v6e-8, tensor_parallel_size: 8}
"""


Lowered = Callable[..., Program]


@pytest.fixture
def program(tmp_path: Path) -> Lowered:
    """Return a function that lowers the recipe with `--set` arguments."""
    return lambda *sets: program_of(tmp_path, sets, RECIPE)


BASELINE = (
    "cost.baseline={name: 2x H100 80GB, train_hours: 5.39, "
    "train_usd_per_hour: 22.12, serve_usd_per_hour: 22.12}"
)
GIVEN = Hours(3.34, "--train-hours")

TEXT = """\
US$                           example  2x H100 80GB  ratio
training                        56.11        119.23   2.12
1 h of serving                  21.52         22.12   1.03
24 h of serving                516.48        530.88   1.03
training and 1 h of serving     77.63        141.35   1.82
training and 24 h of serving   572.59        650.11   1.14

training hours  3.34 h       2x H100 80GB: 5.39 h       --train-hours
training price  US$ 16.80/h  2x H100 80GB: US$ 22.12/h  list price of 2026, on demand: 4 chips at US$ 4.20
serving price   US$ 21.52/h  2x H100 80GB: US$ 22.12/h  list price of 2026-05, on demand: 8 chips at US$ 2.69
ratio: what 2x H100 80GB costs over what example costs
"""


def test_costs_of_the_published_run_match_to_the_cent(program: Lowered) -> None:
    found = cost(program(BASELINE), GIVEN)
    rows = {(row.trained, row.serve_hours): row for row in found.rows}
    assert (rows[True, 0].usd, rows[True, 0].baseline_usd) == (56.11, 119.23)
    assert (rows[True, 1].usd, rows[True, 1].baseline_usd) == (77.63, 141.35)
    assert (rows[True, 24].usd, rows[True, 24].baseline_usd) == (572.59, 650.11)
    ratios = [rows[True, hours].ratio for hours in (0, 1, 24)]
    assert [round(ratio or 0, 2) for ratio in ratios] == [2.12, 1.82, 1.14]
    assert text.write(document(found)) == TEXT
    assert COST.validate_json(COST.dump_json(found)) == found


def test_cost_uses_the_baseline_and_prices_of_the_recipe(program: Lowered) -> None:
    found = cost(
        program(
            "cost.baseline={name: two GPUs, train_hours: 10, train_usd_per_hour: 3, serve_usd_per_hour: 1}",
            "cost.train_usd_per_hour=1.005",
            "cost.serve_usd_per_hour=0",
        ),
        Hours(1, "--train-hours"),
        hours=2,
    )
    assert found.baseline == "two GPUs"
    # Round half a cent up, as it is written: 1.005 has no exact binary form.
    assert found.rows[0].usd == 1.01 and found.rows[0].baseline_usd == 30
    assert [row.serve_hours for row in found.rows] == [0, 1, 2, 24, 1, 2, 24]
    assert found.rows[1].usd == 0 and found.rows[1].ratio is None
    assert found.sources["training price"] == found.sources["serving price"] == "the recipe"
    assert "1 h of serving                   0.00      1.00      -\n" in text.write(document(found))


def test_without_baseline_and_serve_only_training_is_priced(program: Lowered) -> None:
    found = cost(program("serve=null", "launch.spot=true"), GIVEN)
    assert [row.usd for row in found.rows] == [56.11] and found.baseline is None
    assert text.write(document(found)) == (
        "US$       example\n"
        "training    56.11\n"
        "\n"
        "training hours  3.34 h       --train-hours\n"
        "training price  US$ 16.80/h  list price of 2026, on demand: 4 chips at US$ 4.20\n"
        "the recipe has no section `serve`, so the cost is that of training\n"
        "spot capacity costs less than the list price that is used here\n"
    )


@pytest.mark.parametrize("hours", [-1.0, math.nan])
def test_negative_or_infinite_hours_are_refused(program: Lowered, hours: float) -> None:
    with pytest.raises(ArtifactError, match="--serve-hours"):
        cost(program(), GIVEN, hours=hours)
    with pytest.raises(ArtifactError, match="--train-hours") as caught:
        training_hours(hours)
    assert caught.value.help


def planned(hours: float | None) -> RunLength:
    interval = Interval(0.8, 1.75, "a basis")
    return RunLength("data", 922, 1244, 8, hours, None, interval, 16.8, 1.0, None, "no data")


def test_training_hours_prefer_option_then_metrics_then_plan(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "step_seconds": 3600}\n')
    plan = planned(2)
    assert training_hours(1, tmp_path, plan) == Hours(1, "--train-hours")
    measured = training_hours(None, tmp_path, plan)
    assert measured.hours == 1 and measured.source.startswith("measured: ")
    said = "estimate of `recipe plan`, 1.60 to 3.50 h"
    assert training_hours(None, None, plan) == Hours(2, said)
    bound = replace(plan, source="bound")
    assert training_hours(None, None, bound) == Hours(2, f"at most, by the lines of the data: {said}")
    for nothing in (None, planned(None)):
        with pytest.raises(ArtifactError, match="not known how long") as caught:
            training_hours(None, None, nothing)
        assert caught.value.help is not None and "--train-hours" in caught.value.help
        assert "beside the recipe" not in caught.value.help


def test_error_for_unknown_training_hours_names_the_cause() -> None:
    with pytest.raises(ArtifactError, match="takes: the compiler refused its step") as refused:
        training_hours(planned=planned(None))
    assert refused.value.help is not None and "make the step fit" in refused.value.help
    unknown = replace(planned(None), steps=None, note="Not known, since gs://a is not on this machine.")
    with pytest.raises(ArtifactError, match="since gs://a is not on this machine") as caught:
        training_hours(planned=unknown)
    assert caught.value.help is not None and "--set train.steps=N" in caught.value.help


def test_measured_hours_are_the_sum_of_logged_step_seconds(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": 1.0, "step_seconds": 36.0}) for step in range(1, 101)]
    lines.insert(50, '{"step": 50, "eval_loss": 2.0}')
    lines += ['{"step": 101, "step_seconds": "NaN"}', "[]", '{"step": 102, "step_sec']
    path = tmp_path / "metrics.jsonl"
    path.write_text("\n".join(lines))
    found = measured_hours(tmp_path)
    assert found.hours == pytest.approx(1)
    assert found.source == f"measured: steps 1 to 100 in {path}, without loading and saving"
    short = measured_hours(tmp_path, steps=1244)
    assert "steps 1 to 100 of the recipe's 1,244" in short.source
    assert measured_hours(tmp_path, steps=100).source == found.source


def test_measured_hours_count_a_repeated_step_once(tmp_path: Path) -> None:
    lines = [{"step": 1, "step_seconds": 1}, {"step": 4, "step_seconds": 9}, {"step": 4, "step_seconds": 2}]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    found = measured_hours(tmp_path)
    assert found.hours == pytest.approx(3 / 3600) and "2 steps of 1 to 4" in found.source


def test_a_run_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"no metrics\.jsonl") as caught:
        measured_hours(tmp_path / "absent")
    assert caught.value.help is not None and "--train-hours" in caught.value.help
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "eval_loss": 2.0}\n')
    with pytest.raises(ArtifactError, match="no timed training step"):
        measured_hours(tmp_path)
