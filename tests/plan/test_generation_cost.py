"""Tests of the seconds in which completions are generated, by hand, and of what a plan says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from recipec.compiler.cli import main as cli
from recipec.compiler.plan import search as searching
from recipec.compiler.plan.planner import settings
from recipec.compiler.plan.results import Generation
from recipec.compiler.plan.rollout_estimate import fastest_rollout, generation
from recipec.compiler.plan.search_document import document
from tests.plan.plans import lowered

RECIPE = """\
recipe: 1
name: example
model: {id: Qwen/Qwen3-8B}
mesh: {accelerator: v6e-8, axes: {fsdp: 8}}
lora: {rank: 16}
data: {train: [gs://bucket/prompts.jsonl], format: prompt}
train:
  objective: grpo
  global_batch_size: 512
  steps: 100
  grpo: {max_prompt_length: 256, max_completion_length: 1024}
rewards: [{length: {maximum: 100}}]
"""
FULL = ("lora=null", "train.optimizer.name=sgd")
LAYER = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288
MATRICES = 36 * LAYER + 151_936 * 4096
"""Numbers of Qwen3 8B that a token is multiplied with: attention, MLP and the output head."""
KEPT = 36 * 2 * 8 * 128 * 2
"""Bytes of a token's keys and values."""

READ = (127 * 384 + 128 * sum(range(512, 1281, 128))) / 1023
"""Slots that a pass reads on average: the prompt's 256, and the completion's filled ones in blocks of 128."""

pytestmark = pytest.mark.usefixtures("full_speed")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE, encoding="utf-8")
    return path


def rolled(file: Path, *sets: str) -> Generation:
    out = generation(lowered(file, *sets))
    assert out is not None
    return out


def test_pass_of_qwen3_8b_on_tp_by_hand(file: Path) -> None:
    """All weights of the chip, and the filled slots of 512 rows, at 1,638 GB/s; 73 sums of 512 tokens."""
    found = rolled(file, *FULL, "rollout.axes={tp: 8}")
    assert (found.rounds, found.passes) == (1, 1023)
    decode = found.decode
    assert (decode.weights, decode.gathered) == (MATRICES * 2 / 8, 0)
    assert decode.cache == pytest.approx(512 * READ * KEPT / 8)
    assert decode.memory_seconds == pytest.approx((1.892e9 + 7.856e9) / 1638e9, rel=1e-3)
    one = 512 * 4096 * 2
    assert decode.summed == 73 * one
    # Two links of 100 GB/s go into a chip of a 2 x 4 slice, and four hops lie between its corners.
    assert decode.link_seconds == pytest.approx(73 * (2 * 7 / 8 * one / 200e9 + 2 * 4e-6))
    products = 512 * (2 * MATRICES + 36 * 4 * 4096 * READ) / 8
    assert decode.flops == pytest.approx(products) and decode.compute_seconds == pytest.approx(
        products / 918e12
    )
    assert decode.seconds == pytest.approx(decode.memory_seconds + decode.link_seconds)
    assert 0.008 < decode.seconds < 0.010


def test_fsdp_gathers_every_weight_for_a_token(file: Path) -> None:
    found = rolled(file, *FULL, "rollout.axes={fsdp: 8}")
    decode = found.decode
    assert (decode.weights, decode.gathered, decode.summed) == (0, MATRICES * 2, 0)
    assert decode.link_seconds == pytest.approx(7 / 8 * MATRICES * 2 / 200e9 + 4e-6)
    # What arrives is written, and read by the products.
    assert decode.memory_seconds == pytest.approx((4 * MATRICES + 512 * READ * KEPT / 8) / 1638e9)
    assert 80 < found.seconds < 110
    assert rolled(file, "rollout.axes={fsdp: 8}").alternative == {"fsdp": 1, "tp": 8}
    assert rolled(file).alternative == {} and rolled(file).seconds < 15
    mixed = rolled(file, *FULL, "rollout.axes={fsdp: 2, tp: 4}").decode
    assert mixed.gathered == MATRICES * 2 / 4 and mixed.summed == 73 * 256 * 4096 * 2


def test_what_is_handed_over(file: Path) -> None:
    """All weights without adapters, and only the adapters with them; nothing within the mesh that trains."""
    assert rolled(file, *FULL, "rollout.axes={tp: 8}").handed == 8_190_735_360 * 2 / 8
    assert 0 < rolled(file).handed < 0.1e9
    assert rolled(file, "rollout.axes={fsdp: 8}").handed == 0


def test_rounds_iterations_and_reference(file: Path) -> None:
    rounds = rolled(file, "rollout.rows=64")
    assert rounds.rounds == 8 and rounds.decode.cache == rolled(file).decode.cache / 8
    assert rounds.seconds > 1.9 * rolled(file).seconds  # the weights are read for each of them
    one, four = (rolled(file, "train.grpo.beta=0.04", f"train.grpo.iterations={n}") for n in (1, 4))
    apart = one.parts(10.0)
    assert sum(apart.values()) == pytest.approx(10 + one.seconds) and apart["log-probabilities before"] == 0
    # A third of a step with frozen weights: a forward pass of two models, and the gradient of activations.
    assert apart["reference"] == pytest.approx(10 / 3, rel=0.1)
    shared = four.parts(10.0)
    assert shared["tokens"] == pytest.approx(apart["tokens"] / 4)
    assert shared["log-probabilities before"] == pytest.approx(shared["reference"] / 4)
    assert rolled(file).parts(10.0)["reference"] == 0


def test_other_objectives_generate_nothing() -> None:
    assert generation(lowered("qwen3-4b-dpo-v6e4")) is None


def plan(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.usefixtures("told")
def test_plan_counts_generation(file: Path) -> None:
    """A fake step takes 2 s and 0.5 s for each layer."""
    out = json.loads(plan(file, "--json").stdout)["plan"]
    found, run = out["generation"], out["run"]
    update = 20 * run["micro_batches"]
    assert out["estimate"]["seconds"] == pytest.approx(20)
    # 36 layers take 36 ms for the prompts, and in each of 1,023 passes of a token.
    assert found["decode"]["compiled"] == pytest.approx(0.036)
    assert found["prefill"]["compiled"] == pytest.approx(0.036)
    assert run["hours"] == pytest.approx(100 * (update + 1024 * 0.036 + found["handing_seconds"]) / 3600)
    assert found["axes"] == {"fsdp": 1, "tp": 8} and found["compiled_layers"] == [2, 4, 8]
    assert found["estimated"]["decode"]["weights"] == rolled(file).decode.weights
    # The second copy of the frozen weights stays while the step runs.
    assert out["estimate"]["memory"]["rollout"] == 8_190_735_360 * 2 / 8
    words = " ".join(plan(file).stdout.replace("\xa0", " ").split())
    assert "512 completions of 64 prompts are generated on fsdp 1 x tp 8, 512 at once." in words
    assert "Compiled by libtpu from 2, 4 and 8 layers, not measured: a pass of one token takes 36" in words
    assert "upper bound" in words
    assert "a thousand prompts take" in words and "gathers" not in words
    slow = " ".join(plan(file, "--set", "rollout.axes={fsdp: 8}").stdout.replace("\xa0", " ").split())
    assert "a pass of one token takes 108 ms, of which it waits 72" in slow
    assert "fsdp gathers 14.4 GB of weights for every token, in 72" in slow
    assert "`rollout: {axes: {fsdp: 1, tp: 8}}` gathers fewer" in slow


@pytest.mark.usefixtures("told")
def test_completions_that_do_not_fit_are_an_error(file: Path) -> None:
    """4,096 rows have 90 GiB of keys and values on a device. The help has rows that fit."""
    wide = ("--set", "train.global_batch_size=4096", "--set")
    out = plan(file, *wide, "rollout.axes={tp: 8}")
    words = " ".join(out.stderr.replace("\xa0", " ").split())
    assert out.exit_code == 1 and "error[E1009]: generating completions needs" in words
    assert "90.00 GiB of keys and values of 4,096 rows" in words
    rows = int(words.partition("rollout: {rows: ")[2].partition("}")[0])
    again = plan(file, *wide, f"rollout={{axes: {{tp: 8}}, rows: {rows}}}")
    assert "E1009" not in again.stderr and 1024 < rows < 4096


def test_fastest_rollout_has_the_most_rows_that_fit(file: Path) -> None:
    unchanged = lowered(file)
    assert fastest_rollout(unchanged) is unchanged
    better = fastest_rollout(lowered(file, "rollout.axes={fsdp: 8}", "rollout.rows=64")).recipe.rollout
    assert (better.axes, better.rows) == ({"fsdp": 1, "tp": 8}, None)
    wide = fastest_rollout(lowered(file, "train.global_batch_size=4096", "rollout.rows=64")).recipe.rollout
    assert (wide.axes, wide.rows) == ({"fsdp": 1, "tp": 8}, 512)


@pytest.mark.usefixtures("told")
def test_search_counts_generation_and_varies_the_rollout(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Look only at the recipe's own step, which takes 20 s a micro-batch."""
    every = searching.variants
    monkeypatch.setattr(searching, "variants", lambda program, free: every(program, free)[:1])
    slow = ("rollout.axes={fsdp: 8}",)
    program = lowered(file, *slow)
    found = searching.search(program, searching.SearchOptions(slow))
    baseline, better = found.points
    assert better.sets == ("rollout.axes={fsdp: 1, tp: 8}", "rollout.rows=null") and found.front[0] == 1
    for point, rollout in ((baseline, rolled(file, *slow)), (better, rolled(file))):
        assert point.generation_seconds == pytest.approx(rollout.seconds)
        update = 20 * program.accumulation_steps
        assert point.seconds_per_token == pytest.approx((update + rollout.seconds) / (512 * 1280))
    words = str(document(found, settings(program), ("fsdp", "tp"), 8))
    assert "1 x 8, all" in words and "8 x 1, all" in words


def test_a_share_of_a_distillations_steps_generates(tmp_path: Path) -> None:
    text = RECIPE.partition("train:\n")[0].replace("format: prompt", "max_length: 1280") + (
        "train:\n  objective: distill\n  global_batch_size: 512\n  steps: 100\n"
        "  distill: {teacher: {id: Qwen/Qwen3-14B}, lmbda: 0.25, max_completion_length: 1024}\n"
    )
    (tmp_path / "distill.yaml").write_text(text, encoding="utf-8")
    rolled = generation(lowered(tmp_path / "distill.yaml"))
    assert rolled is not None
    assert (rolled.prompts, rolled.passes) == (512, 1023)
    parts = rolled.parts(8.0)
    assert parts["update"] == 8.0
    assert sum(parts.values()) - 8.0 == pytest.approx(rolled.seconds / 4) == rolled.seconds_per_step
    assert rolled.bound_per_step == rolled.bound / 4
