"""Tests of the commands `plan`, `cost`, `diff --plan` and `calibrate`, with a fake compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from recipec.compiler.errors import ArtifactError
from recipec.compiler.plan import calibration
from tests.plan.plans import lowered

RECIPE = """\
recipe: 1
name: example
model: {id: google/gemma-4-31B-it}
mesh: {accelerator: v5p-8, axes: {fsdp: 4, tp: 1}}
lora: {rank: 16}
data: {train: [gs://bucket/train.jsonl]}
train: {steps: 100, global_batch_size: 4}
"""
RUNNER = CliRunner()


pytestmark = pytest.mark.usefixtures("full_speed", "told")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def run(*arguments: Any) -> Any:
    return RUNNER.invoke(cli.app, [str(a) for a in arguments], catch_exceptions=False)


def planned(*arguments: Any) -> dict[str, Any]:
    done = run("plan", *arguments, "--json")
    out: dict[str, Any] = json.loads(done.stdout)
    return out


def test_plan_gives_figures_of_all_layers_and_caches_them(file: Path) -> None:
    plan = planned(file)["plan"]
    # 2 outside of the layers and 0.5 in each of the 60.
    assert plan["estimate"]["memory"]["weights"] == pytest.approx(32)
    assert plan["estimate"]["timeline"]["products"] == pytest.approx(32)
    assert plan["estimate"]["compiled_layers"] == [2] and plan["cached"] is False
    assert plan["run"]["steps"] == 100 and plan["run"]["hours"] == pytest.approx(100 * 32 / 3600)
    assert planned(file)["plan"]["cached"] is True


def test_first_estimate_is_shown_while_all_layers_are_scheduled(file: Path, fake: Path) -> None:
    done = run("plan", file)
    first, plan = done.stderr, done.stdout
    assert "First estimate of example" in first and "From schedules of 6 and 12 of its 60 layers" in first
    assert "Step of a micro-batch: 32,000 ms; 25,056 ms to 40,480 ms" in first
    words = " ".join(plan.split())
    assert "The first estimate, from schedules of 6 and 12 layers, was" in words
    assert "32,000 ms a micro-batch (+0.0 %)" in words
    assert len(list(fake.iterdir())) == 4
    again = run("plan", file)
    assert "First estimate" not in again.stderr and len(list(fake.iterdir())) == 4, "the plan is in the cache"


def test_note_on_another_mesh_takes_its_time_only_from_the_cache(file: Path, fake: Path) -> None:
    command = f"recipe plan {file} --set 'mesh.axes={{fsdp: 2, tp: 2}}'"
    (note,) = planned(file)["plan"]["notes"]
    assert note.endswith(f"is not planned yet; its time and memory: {command}")
    begun = len(list(fake.iterdir()))
    assert planned(file, "--set", "mesh.axes={fsdp: 2, tp: 2}")["plan"]["notes"] == []
    other = len(list(fake.iterdir()))
    assert other > begun
    (note,) = planned(file)["plan"]["notes"]
    # Two micro-batches of 32 s, each with half the rows. Nothing is compiled.
    assert "takes an estimated 64,000.0 ms for an optimizer's step" in note
    assert "where this mesh takes 32,000.0 ms" in note and len(list(fake.iterdir())) == other
    assert "takes an estimated 64,000.0 ms" in " ".join(run("plan", file).stdout.split())
    assert planned(file, "--set", "lora.init=zero_a")["plan"]["notes"] == []


def test_killed_compile_error_says_that_memory_ran_out(file: Path, told: pytest.MonkeyPatch) -> None:
    told.setenv("FAKE_WORKER_TOLD", "killed above 12")
    with pytest.raises(ArtifactError) as caught:
        run("plan", file)
    assert "most likely because this machine's memory ran out" in str(caught.value)
    assert caught.value.help and "--exact" in caught.value.help


def test_refused_libtpu_flag_error_points_at_recipe_or_environment(
    file: Path, told: pytest.MonkeyPatch
) -> None:
    told.setenv("FAKE_WORKER_TOLD", "refused")
    file.write_text(RECIPE + "xla:\n  flags:\n    xla_enable_async_all_gather: maybe\n", encoding="utf-8")
    done = run("plan", file)
    assert done.exit_code == 1 and f"{file}:10:34" in done.stderr
    assert "error[E1008]: libtpu does not accept the value maybe of the flag xla_enable_" in done.stderr
    file.write_text(RECIPE, encoding="utf-8")  # the environment has the flag
    with pytest.raises(ArtifactError) as caught:
        run("plan", file)
    for place in ("xla.flags.xla_enable_async_all_gather", "LIBTPU_INIT_ARGS"):
        assert place in str(caught.value.help)


def test_plan_above_its_hour_budget_exits_with_E1003(file: Path) -> None:
    sets = ("--set", "budget={max_hours: 0.5, max_usd: 1000, max_hbm_share: 0.5}")
    done = run("plan", file, *sets)
    assert done.exit_code == 1
    assert (
        "error[E1003]: the run takes an estimated 0.89 hours, and budget.max_hours allows 0.5" in done.stderr
    )
    assert "E1002" not in done.stderr and "E1004" not in done.stderr
    found = planned(file, *sets)["diagnostics"]
    assert [(item["code"], item["file"], item["path"]) for item in found] == [
        ("E1003", "--set", "budget.max_hours")
    ]


def test_too_large_step_fails_the_plan_and_warns_in_a_later_check(
    file: Path, told: pytest.MonkeyPatch
) -> None:
    told.setenv("FAKE_WORKER_TOLD", "too large")
    done = run("plan", file)
    assert done.exit_code == 1 and "error[E1001]" in done.stderr
    checked = run("check", file)
    assert checked.exit_code == 0
    assert "warning[W1007]: by an earlier plan the step with the flags of profile v5p needs" in checked.stderr
    assert "W1007" not in run("check", file, "--set", "lora.rank=8").stderr  # not planned yet


def test_html_option_writes_the_plan_page(file: Path, tmp_path: Path) -> None:
    done = run("plan", file, "--html", tmp_path / "plan.html")
    assert done.exit_code == 0
    assert "google/gemma-4-31B-it" in (tmp_path / "plan.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("--html", "{0}/nowhere/plan.html"),
            "{0}/nowhere/plan.html cannot be written: there is no folder",
        ),
        (("--html", "{0}"), "{0} is a folder"),
        (("--serve",), "the recipe has no `serve` section"),
        (("--model", "{0}/nowhere"), "{0}/nowhere: no such folder"),
        (("--data-dir", "{0}/nowhere"), "{0}/nowhere: no such folder"),
        (("--model", "{0}"), "there is no tokenizer in {0}"),
    ],
)
def test_plan_refuses_invalid_paths_and_options_before_compiling(
    file: Path, tmp_path: Path, fake: Path, arguments: tuple[str, ...], said: str
) -> None:
    file.write_text(RECIPE.replace("gs://bucket/train.jsonl", "train.jsonl"), encoding="utf-8")
    (tmp_path / "train.jsonl").touch()
    with pytest.raises(ArtifactError) as caught:
        run("plan", file, *(word.format(tmp_path) for word in arguments))
    assert said.format(tmp_path) in str(caught.value) and caught.value.help
    assert not list(fake.iterdir())


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_plan_succeeds_with_a_closed_stdout_or_stderr(
    file: Path, told: pytest.MonkeyPatch, stream: str
) -> None:
    told.setattr("sys.argv", ["recipe", "plan", str(file)])
    told.setattr(f"sys.{stream}", None)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0


def test_plan_refuses_a_cpu_recipe(root: Path, told: pytest.MonkeyPatch, capsys: Any) -> None:
    told.setattr("sys.argv", ["recipe", "plan", str(root / "recipes" / "quickstart.yaml")])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert capsys.readouterr().err.startswith("error: cpu-8 is not a TPU, and a plan is compiled for a TPU\n")


def test_plan_of_an_unknown_model_prints_an_E08_diagnostic(file: Path) -> None:
    done = run("plan", file, "--set", "model.id=nobody/nothing-7b")
    assert done.exit_code == 1 and "error[E08" in done.stderr


def test_plan_of_two_slices_counts_devices_slices_and_hosts(file: Path) -> None:
    sets = ("--set", "mesh={accelerator: v5p-16, axes: {dcn: 2, fsdp: 8}}", "--set")
    sets = (*sets, "train.global_batch_size=16")
    plan = planned(file, *sets)["plan"]
    assert (plan["devices"], plan["slices"], plan["hosts"]) == (16, 2, 4)


def test_cost_uses_the_plan_unless_train_hours_are_given(file: Path) -> None:
    done = run("cost", file)
    assert done.exit_code == 0 and "estimate of `recipe plan`" in done.stdout
    assert "16.80" in run("cost", file, "--train-hours", "1").stdout


def test_diff_plan_prints_the_change_in_hours(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(RECIPE.replace("steps: 100", "steps: 200"), encoding="utf-8")
    done = run("diff", file, other, "--plan")
    assert done.exit_code == 0
    assert "hours" in done.stdout and "+100" in done.stdout


def test_plan_search_prints_a_table_of_configurations(file: Path) -> None:
    # A model with few layers: the search checks 72 configurations.
    done = run("plan", file, "--search", "--most", "4", "--set", "model.id=google/gemma-3-1b-it")
    assert done.exit_code == 0, done.stderr
    assert "remat" in done.stdout


MEASURED = {"micro_batch_seconds": 64.0, "peak_bytes": 2**30}


def probe(folder: Path, seconds: float, **changes: Any) -> Path:
    """Write a recipe and a probe of it."""
    (folder / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    program = lowered(folder / "recipe.yaml")
    found = {
        "probe": 1,
        "date": "2026-11-26",
        "recipe": calibration.digest(program),
        "machine": {"platform": "tpu", "flags": list(calibration.flags(program))},
        "versions": {},
        "time": {"micro_batch_seconds": seconds, "peak_bytes": None},
        "problems": [],
        **changes,
    }
    (folder / "probe.json").write_text(json.dumps(found), encoding="utf-8")
    return folder / "probe.json"


def seconds_and_basis(folder: Path) -> tuple[float, str]:
    estimate = planned(folder / "recipe.yaml")["plan"]["estimate"]
    return estimate["seconds"], estimate["interval"]["basis"]


def test_plan_uses_and_cites_the_calibrated_probe(tmp_path: Path) -> None:
    file = probe(tmp_path, 35.2)
    before, _ = seconds_and_basis(tmp_path)
    assert before == pytest.approx(32)  # 2 outside of the layers and 0.5 in each of the 60
    said = run("calibrate", file).stdout
    assert "1.100 times the planned" in said and "outside" not in said
    seconds, basis = seconds_and_basis(tmp_path)
    assert seconds == pytest.approx(35.2)
    assert "1 probe on v5p took 1.1 times the estimate" in basis and str(calibration.path()) in basis
    assert "by probes of such machines" in run("plan", tmp_path / "recipe.yaml").stdout
    assert "matrix products" not in said
    parts = {"products": 30.0, "other": 3.0, "idle": 2.2}
    said = run(
        "calibrate", probe(tmp_path, 35.2, time=MEASURED | {"micro_batch_seconds": 35.2, "parts": parts})
    ).stdout
    assert "    matrix products 30,000.0 ms, planned " in said and "\n    no operation 2,200.0 ms" in said
    assert "HBM at its peak: 1.00 GiB, planned" in said
    # A new probe of the same recipe replaces the old one. It is compared with the uncalibrated plan.
    run("calibrate", probe(tmp_path, 32.0))
    assert seconds_and_basis(tmp_path)[0] == pytest.approx(32)


@pytest.mark.parametrize(
    ("seconds", "changes", "cause"),
    [
        (64.0, {"versions": {"jax": "0.0.1"}}, "the probe ran jax 0.0.1"),
        (64.0, {"machine": {"platform": "tpu", "flags": []}}, "other flags of libtpu"),
        (64.0, {"product": {"slow": ["device 3 takes 2.00 times as long"]}}, "device 3 takes 2.00 times"),
        (16.0, {}, "reach more than those of published runs"),
        (64.0, {}, "none that the files show"),
        (
            64.0,
            {"time": MEASURED | {"parts": {"products": 32.0, "collectives": 24.0, "idle": 8.0}}},
            "exposed collectives took 24,000.0 ms, and 0 ms were planned",
        ),
    ],
)
def test_probe_outside_the_interval_gets_a_likely_cause(
    tmp_path: Path, seconds: float, changes: dict[str, Any], cause: str
) -> None:
    said = run("calibrate", probe(tmp_path, seconds, **changes)).stdout
    assert "outside the interval; a likely cause: " in said and cause in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"probe": 2}, "a probe of version 2"),
        ({"machine": {"platform": "cpu"}}, "from a cpu"),
        ({"problems": ["on a mesh it differs"]}, "on a mesh it differs"),
        ({"time": {}}, "no time of the step"),
        ({"time": MEASURED | {"parts": {"products": "much"}}}, "parts of a step are not times"),
        ({"time": MEASURED | {"parts": 3}}, "is not the file of a probe"),
        ({"recipe": "another"}, "of another recipe"),
    ],
)
def test_calibrate_refuses_invalid_probes(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        run("calibrate", probe(tmp_path, 32.0, **changes))
    assert not calibration.path().exists()
