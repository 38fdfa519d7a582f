"""Tests of a run's page, in every state of the run."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.cli import main as cli
from recipec.compiler.pages.html import script_hash
from recipec.compiler.plan.results import PLAN
from tests.plan import plans
from tests.report import writing
from tests.report.reading import RUNNER, golden, refused, report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def test_run_page_matches_golden_file(place: Path, request: pytest.FixtureRequest) -> None:
    fast = writing.run(place / "fast" / "checkpoints", resumed=(120,))
    slow = writing.run(
        place / "slow" / "checkpoints", rate=3e-3, text=writing.TPU.replace("rank: 24}", "rank: 8}")
    )
    merges = [{"step": 200, "at": "2026-11-22T16:00:00Z", "folder": "/data/merged", "adapter": None}]
    merges[0] |= {"dtype": "bfloat16", "quantization": None, "bytes": 5 << 30, "tensors": 420, "kept": 412}
    merges[0] |= {"quantized": 0, "verified": VERIFIED}
    (fast / "merges.json").write_text(json.dumps(merges))
    for folder in (fast, slow):
        os.utime(folder / "metrics.jsonl", (1_795_000_000, 1_795_000_000))
    page = report("fast/checkpoints", "--compare", "slow/checkpoints")
    golden("compared", page, request.config.getoption("--update"))


VERIFIED = {
    "files": 12,
    "bytes": 5 << 30,
    "tensors": {"trained": 420, "kept": 412, "largest": 3.1e-5},
    "logits": {"rule": 2.0e-6, "rule_tolerance": 3e-5, "files": 1e-6, "files_tolerance": 4e-5, "effect": 1.3},
}


def test_artifact_folder_reports_the_run_in_it(place: Path) -> None:
    folder = writing.run(place / "made" / "checkpoints")
    (place / "made" / "recipe.lock.json").write_bytes((folder / "recipe.lock.json").read_bytes())
    assert report("made").charts["loss"] == report("made/checkpoints").charts["loss"]


def test_curves_show_the_logged_values(place: Path) -> None:
    folder = writing.run(place / "run", resumed=(120,))
    page = report("run")
    charts, layout = page.charts, page.figures["curves"]["layout"]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    raw, mean, evaluated = charts["loss"]
    steps = [entry for entry in logged if "loss" in entry]
    assert raw["x"] == [entry["step"] for entry in steps]
    assert raw["y"] == pytest.approx([entry["loss"] for entry in steps], rel=1e-5)
    around = [sum(entry["loss"] for entry in steps[at - 2 : at + 3]) / 5 for at in range(2, len(steps) - 2)]
    assert mean["y"][2:-2] == pytest.approx(around, rel=1e-5)
    against = {one["label"]: one["args"][0]["x"] for one in layout["updatemenus"][0]["buttons"]}
    assert against["steps"][0] == raw["x"] and against["tokens"][0][-1] == 200 * 900
    assert against["hours"][0][-1] == pytest.approx(sum(e["step_seconds"] for e in steps) / 3600, rel=1e-5)
    assert evaluated["y"] == pytest.approx([e["eval_loss"] for e in logged if "eval_loss" in e], rel=1e-5)
    assert against["tokens"][2][0] == 25 * 900
    marks = [mark for mark in layout["shapes"] if mark["xref"] == "x"]
    assert [(mark["x0"], mark["label"]["text"]) for mark in marks] == [(120, "resumed after step 120")]
    tokens = layout["updatemenus"][0]["buttons"][1]["args"][1]["shapes"]
    assert tokens[0]["x0"] == 120 * 900
    assert charts["memory"][0]["y"][0] == pytest.approx(1.8)
    # The first step compiles, so that the axis shows the other steps.
    (time,) = charts["step-time"]
    assert layout[f"yaxis{time['yaxis'][1:]}"]["range"][1] < 2 < time["y"][0]
    # All of them show the same part of the run.
    assert all(layout[name]["matches"] == "x" for name in layout if re.fullmatch(r"xaxis\d+", name))


def test_plotly_accepts_every_figure(place: Path) -> None:
    from plotly.graph_objects import Figure

    writing.write(place / "run", list(writing.lines(60, preference=True)), writing.facts(60), None)
    writing.sweep(place / "bench")
    for page in (report("run", "--results", "bench"), report("bench")):
        assert len(page.figures) >= 5
        for figure in page.figures.values():
            Figure(**figure)  # raises on an unknown attribute


def test_nan_loss_is_reported_and_marked(place: Path) -> None:
    entries = list(writing.lines(20))
    for entry in entries:
        if entry["step"] in (15, 16) and "loss" in entry:
            entry |= {"loss": "NaN", "grad_norm": "Infinity"}
    writing.write(place / "run", entries, writing.facts(20), None)
    page = report("run")
    assert "Not a number. the loss is NaN at step 15, and at 1 later step." in page.words
    assert "the gradient's norm is Infinity at step 15" in page.words
    (loss, *_) = page.charts["loss"]
    gap = loss["x"].index(15)
    assert loss["y"][gap] is None and loss["x"][gap + 1] == 17 and loss["y"][gap + 1] is not None
    marks = [mark for mark in page.figures["curves"]["layout"]["shapes"] if mark["xref"] == "x"]
    assert [mark["label"]["text"] for mark in marks] == ["nan at step 15", "nan at step 16"]


@pytest.mark.parametrize("steps", [1, 2])
def test_run_of_few_steps_is_drawn_with_markers(place: Path, steps: int) -> None:
    writing.write(place / "run", list(writing.lines(steps)), writing.facts(steps), None)
    page = report("run")
    assert f"done: {steps} step" in page.words and page.charts["loss"][0]["mode"] == "lines+markers"


def test_a_long_run_is_thinned_and_says_so(place: Path) -> None:
    entries = list(writing.lines(6_000, evaluate=500))
    entries[3_333]["loss"] = 99.0
    writing.write(place / "run", entries, writing.facts(6_000), None)
    page = report("run")
    raw = page.charts["loss"][0]
    assert len(raw["y"]) <= 2000 and max(raw["y"]) == 99.0
    assert "at most 2,000 of 6,000 points are drawn" in page.words
    assert "of 6,000 steps, evenly apart." in page.words
    assert Path("page.html").stat().st_size < 1_500_000


def test_unfinished_run_is_reported_as_running_or_killed(place: Path) -> None:
    entries = list(writing.lines(200))[:50]
    folder = writing.write(place / "run", entries, writing.facts(200), None)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 51, "lo')
    words = report("run").words
    assert "not finished: 49 of 200 steps" in words and "The run is still running, or was killed." in words
    assert "The last line of metrics.jsonl is cut off, and left out." in words


def test_stopped_or_failed_run_shows_its_reason(place: Path) -> None:
    folder = writing.write(place / "run", list(writing.lines(5)), writing.facts(200), None)
    for state, reason, said in (
        ("stopped", "SIGTERM", "Stopped. 5 of 200 steps are done: SIGTERM."),
        ("failed", "no room.", "Failed. 5 of 200 steps are done: no room."),
    ):
        (folder / "state.json").write_text(json.dumps({"state": state, "reason": reason, "total": 200}))
        words = report("run").words
        assert said in words and f"{state} after 5 of 200 steps" in words


def test_run_without_run_json_has_a_page(place: Path) -> None:
    folder = writing.run(place / "run")
    for name in ("run.json", "recipe.yaml"):
        (folder / name).unlink()
    words = report("run").words
    assert "The run left no statistics of its data" in words
    assert "done: 200 steps" in words, "of the recipe's train.steps"
    assert "lora.rank 24 the recipe" in words and "model.attention splash the recipe, or auto" in words
    assert "train.optimizer.name adamw as by default" in words


def test_a_run_without_a_lock_has_a_page(place: Path) -> None:
    writing.write(place / "run", list(writing.lines(3)), None, None)
    words = report("run").words
    assert "3 steps logged" in words and "The recipe is not known" in words
    (place / "run" / "recipe.lock.json").write_text("{")
    assert "There is no recipe.lock.json that can be read" in report("run").words


def test_a_run_that_has_logged_nothing_has_a_page(place: Path) -> None:
    folder = writing.run(place / "run")
    (folder / "metrics.jsonl").write_text("")
    page = report("run")
    assert "no step yet" in page.words and "Nothing was logged: there is nothing to draw." in page.words
    (folder / "metrics.jsonl").unlink()
    assert "There is no metrics.jsonl" in report("run").words


def test_recipe_with_unknown_key_gives_a_note(place: Path) -> None:
    folder = writing.run(place / "run")
    lock = json.loads((folder / "recipe.lock.json").read_text())
    lock["recipe"]["train"]["invented"] = 1
    (folder / "recipe.lock.json").write_text(json.dumps(lock))
    assert "This version does not read the recipe of recipe.lock.json:" in report("run").words


def test_recipe_values_show_their_file_and_line(place: Path) -> None:
    folder = writing.run(place / "run")
    assert re.search(r"lora\.rank 24 recipe\.yaml:\d+ ", report("run").words)
    other = writing.recipe(place / "other", writing.TPU.replace("rank: 24", "rank: 32"))
    words = report("run", "--recipe", str(other)).words
    assert "is not the recipe of this run" in words and "lora.rank 24 the recipe" in words
    (folder / "recipe.yaml").unlink()
    own = writing.recipe(place / "own")
    assert "lora.rank 24 own/example.yaml:5" in report("run", "--recipe", str(own)).words


def test_preference_run_has_reward_charts(place: Path) -> None:
    writing.write(place / "run", list(writing.lines(60, preference=True)), None, None)
    charts = report("run").charts
    assert [curve["name"] for curve in charts["rewards"]] == ["chosen", "rejected"]
    assert {"margin", "accuracy"} <= charts.keys()


def test_user_text_cannot_inject_html(place: Path) -> None:
    about = writing.facts(60) | {"name": EVIL}
    about["data"]["train"]["malformed"]["first"] = [{"origin": EVIL, "reason": EVIL}]
    writing.write(place / "run", list(writing.lines(60)), about, None)
    other = writing.write(place / EVIL.replace("/", "_"), list(writing.lines(60)), about, None)
    page = report("run", "--compare", str(other))
    assert len(page.scripts) == 1 + len(page.figures) and not page.named("img")
    assert EVIL in page.words
    drawn = json.dumps(page.figures).replace("<extra></extra>", "")
    assert "<" not in drawn and "&lt;" in drawn, "Plotly takes texts for markup"


def test_content_security_policy_lists_script_hashes(place: Path) -> None:
    writing.write(place / "run", list(writing.lines(3)), None, None)
    page = report("run")
    (policy,) = (one["content"] for one in page.named("meta") if one.get("http-equiv"))
    assert "default-src 'none'" in policy
    for script in page.scripts[1:]:
        assert f"'{script_hash(script)}'" in policy
    assert not [one for one in page.elements if {"src", "href"} & one[1].keys()]


def plan_file(place: Path) -> Path:
    path = place / "plan.json"
    path.write_text(json.dumps({"plan": PLAN.dump_python(plans.flagship(), mode="json")}))
    return path


def test_measured_values_are_shown_next_to_plan_estimates(place: Path) -> None:
    writing.write(place / "run", list(writing.lines(50)), writing.facts(50, platform="tpu"), None)
    words = report("run", "--plan", str(plan_file(place))).words
    assert "estimate its interval measured measured to estimate" in words
    plan = plans.flagship()
    step = plan.estimate.seconds * plan.run.micro_batches
    assert f"Optimizer step {step:.2f} s" in words
    low, high = plan.estimate.interval.of(step)
    assert f"Optimizer step {step:.2f} s {low:.2f} s to {high:.2f} s " in words
    speed = plan.run.tokens_per_second
    ends = f"{speed / plan.estimate.interval.high:,.0f} to {speed / plan.estimate.interval.low:,.0f}"
    assert f"Tokens a second {speed:,.0f} {ends} " in words
    (measured,) = re.findall(r"Optimizer step [\d.]+ s [\d.]+ s to [\d.]+ s ([\d.]+) ms ([\d.]+) x", words)
    assert float(measured[0]) / 1000 / step == pytest.approx(float(measured[1]), rel=0.01)
    assert "Measured on 4 devices of the kind TPU v5; planned for v5p:2x2x1." in words
    assert "The plan is of the recipe gemma4-31b-v5p8, the run of example." in words


def test_cpu_run_says_that_ratios_do_not_test_the_plan(place: Path) -> None:
    writing.write(place / "run", list(writing.lines(50)), writing.facts(50), None)
    words = report("run", "--plan", str(plan_file(place))).words
    assert "Ran on 8 virtual CPU devices: no TPU" in words
    assert "the ratios compare a CPU with a TPU, and do not test the plan." in words


def test_a_plan_in_the_cache_is_found_without_compiling(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from recipec.compiler import store
    from recipec.compiler.plan import depth, identity, pool
    from recipec.compiler.plan.planner import job
    from recipec.compiler.plan.results import COMPILED, Compiled
    from recipec.compiler.plan.schedule import Schedule, Work
    from recipec.compiler.report.recorded_run import read_runs

    writing.run(place / "run")
    assert "There is no plan of this recipe in recipec's cache" in report("run").words
    (run,) = read_runs(["run"])
    assert run.program is not None
    for one in depth.parts(run.program).refined:
        layers = len(one.layers)
        step = Schedule((Work(products=0.1 * layers),))
        made = Compiled(layers, 2e9 + layers * 5e8, 1e6, 2e6, 1e5, 3e9, 1e9, 1e6, 1e12, 1e10, step)
        name = identity.name(*job(run.program, (), one))
        store.put(name, COMPILED.dump_json(made).decode())
    monkeypatch.setattr(pool._Pool, "run", lambda self, waiting, done: [] if not waiting else 1 / 0)
    words = report("run").words
    assert (
        "Plan from recipec's cache" in words and "Counted in the data: 302 samples, 8 rows left out" in words
    )


def test_report_finds_merge_benchmark_and_evaluation_results(place: Path) -> None:
    work = place / "artifact"
    writing.run(work / "checkpoints", text=writing.TPU.replace("gs://bucket/run", "checkpoints"))
    writing.sweep(work / "results" / "bench")
    (work / "results" / "eval").mkdir()
    interval = {"value": 0.61, "low": 0.55, "high": 0.67}
    summary: dict[str, Any] = {"name": "example", "sides": {"base": {"model": "b"}, "tuned": {"model": "t"}}}
    summary |= {"prompts": None, "problems": [], "notes": ["a note"]}
    row = {"task": "gsm8k", "metric": "exact_match", "base": interval, "tuned": {"value": 0.7}}
    summary["tasks"] = [row]
    (work / "results" / "eval" / "summary.json").write_text(json.dumps(summary))
    (work / "merged").mkdir()
    record = {"merge": 1, "checkpoint": {"step": 200}, "dtype": "bfloat16", "files": {"a": {"size": 1 << 30}}}
    record["tensors"] = {"merged": 420, "kept": 412, "quantized": 0}
    (work / "merged" / "merge.json").write_text(json.dumps(record))
    verify: dict[str, Any] = {"checkpoint": "merged", "tolerance": {"largest": 0.1}, "largest": 0.02}
    verify |= {"prompts": [{"prompt": "Hi", "parts_at": None, "largest": 0.02}], "problems": []}
    (place / "verify.json").write_text(json.dumps(verify))
    page = report("artifact/checkpoints", "--results", "verify.json")
    for words in (
        "benchmark artifact/results/bench",
        "Measured on a stand-in for a server, as --machine says",
        "gsm8k, exact_match 0.610 (0.550 to 0.670) 0.700",
        "merge artifact/merged step 200 size 1.0 GiB in 1 file",
        "verdict the same model",
    ):
        assert words in page.words, words
    assert "ttft" in page.charts


def test_failed_merge_verification_is_reported(place: Path) -> None:
    folder = writing.write(place / "run", list(writing.lines(3)), None, None)
    entry = {"step": 3, "folder": "/m", "dtype": "float32", "bytes": 1, "tensors": 1, "kept": 1}
    entry |= {"verified": {"files": 1, "problem": "/m: is not what was trained"}}
    (folder / "merges.json").write_text(json.dumps([entry, "nonsense"]))
    words = report("run").words
    assert "verified no" in words and "/m: is not what was trained." in words


def test_report_refuses_bad_inputs_and_keeps_other_files(place: Path) -> None:
    writing.write(place / "run", list(writing.lines(3)), None, None)
    (place / "empty").mkdir()
    (place / "notes.html").write_text("mine")
    assert "there is no folder missing" in refused("missing")
    assert "notes.html is not a folder" in refused("notes.html")
    assert "empty contains neither a run nor a sweep" in refused("empty")
    assert "exists and is not a report: it was not changed" in refused("run", "-o", "notes.html")
    assert (place / "notes.html").read_text() == "mine"
    assert "empty is a folder" in refused("run", "-o", "empty")
    assert "is not a regular file" in refused("run", "-o", "/dev/null")
    assert "cannot be written: there is no folder no" in refused("run", "-o", "no/page.html")
    assert "is not a plan as" in refused("run", "--plan", "notes.html")
    assert "there is no plan.json" in refused("run", "--plan", "plan.json")
    assert "there is no gone.yaml" in refused("run", "--recipe", "gone.yaml")
    assert "holds no results that a report can show" in refused("run", "--results", "empty")
    assert "is not a result that a report can show" in refused("run", "--results", "notes.html")
    assert "empty holds no run" in refused("run", "--compare", "empty")
    assert sorted(path.name for path in place.iterdir() if path.suffix == ".html") == ["notes.html"]


def test_second_report_replaces_the_first_page(place: Path) -> None:
    writing.write(place / "run", list(writing.lines(3)), writing.facts(3) | {"name": "a/b c"}, None)
    for _ in range(2):
        done = RUNNER.invoke(cli.app, ["report", "run"], catch_exceptions=False)
        assert done.exit_code == 0 and done.stdout == "a-b-c-report.html: written\n"
    assert [path.name for path in place.glob("*.html")] == ["a-b-c-report.html"]


def test_run_at_a_remote_address_has_a_page(place: Path) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    folder = writing.run(place / "run")
    for path in folder.iterdir():
        files.pipe(f"/bucket/run/{path.name}", path.read_bytes())
    assert "done: 200 steps" in report("memory://bucket/run").words
    assert "there is no folder memory://bucket/other" in refused("memory://bucket/other")
    assert "nonsense://x" in refused("nonsense://x")


def test_early_stopped_run_shows_samples_and_eval_sources(place: Path) -> None:
    entries = list(writing.lines(60))
    for entry in entries:
        if "eval_loss" in entry:
            entry |= {"eval/chat": entry["eval_loss"] - 0.5, "eval/code": entry["eval_loss"] + 0.5}
    folder = writing.write(place / "run", entries, writing.facts(200), None)
    why = "early stopping after step 60: no progress in 2 evaluations; eval_loss was lowest, 2.3000, at 20"
    (folder / "state.json").write_text(json.dumps({"state": "done", "reason": why, "total": 200}))
    samples = [
        {
            "step": step,
            "prompt": prompt,
            "answer": f"{name} at {step}\u2028\u0085.",
            "tokens": 3,
            "ended": True,
        }
        for step in (0, 25, 50)
        for name, prompt in (("one", "Say one."), ("two", [{"role": "user", "content": f"Say {EVIL}"}]))
    ]
    written = "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in samples)
    (folder / "generations.jsonl").write_text(written + '{"step": 5', encoding="utf-8")
    page = report("run")
    assert "stopped early after 60 of 200 steps" in page.words and why in page.words
    assert "Not finished" not in page.words
    assert {trace["name"] for trace in page.charts["eval-sources"]} == {"chat", "code"}
    for text in ("Say one.", "one at 0", "two at 50"):
        assert text in page.words
    assert EVIL not in Path("page.html").read_text()
