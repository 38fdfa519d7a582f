"""Tests of a train.py that learns from rewards of its own completions: finished, stopped and resumed."""

from __future__ import annotations

import json
import signal
import statistics
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.checkpoints.record import check_record
from recipec.runtime.errors import UserError
from tests.runtime.artifacts import assert_equal, error_of, steps, train
from tests.runtime.lives import Lives
from tests.runtime.reinforced import REWARDS, write_reinforced

TIMES = ("seconds", "tokens_per_second", "peak_memory_bytes")

KILLED = """
import os
import signal
import statistics

from runtime.training import rollouts

rolled = rollouts.Rollouts._rolled


def killed(self, number, step):
    out = rolled(self, number, step)
    if number == {number} and "--resume" not in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    return out


rollouts.Rollouts._rolled = killed
"""
"""Code of an artifact that is killed between the rollout of a batch and its first update."""

ROUNDED = """
from runtime.sections import FakeQuantization

MODEL = dataclasses.replace(MODEL, qat=FakeQuantization(group_size=16, start_step=3))
"""
"""Code of an artifact that computes with rounded weights from the fourth step on."""

COARSE = """
def vowels(completions, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [float(sum(letter in "aeiou " for letter in text) > 3) for text in texts]
"""
"""Rewards of which some groups have no difference."""


def metrics(place: Path, output: str) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl without what differs from run to run."""
    lines = (place / output / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return [
        {name: value for name, value in entry.items() if not name.endswith(TIMES)}
        for entry in map(json.loads, lines)
    ]


def completions(place: Path, output: str) -> str:
    return (place / output / "checkpoints" / "completions.jsonl").read_text()


def test_run_learns_from_rewards(place: Path, lives: Lives) -> None:
    write_reinforced(place, "rl", rate=2e-2, steps=8)
    found = train(lives, place, "out", artifact="rl")
    assert found.status == 0, found.stderr
    assert "step 8/8: reward " in found.stderr
    entries = metrics(place, "out")
    rewards = [entry["reward"] for entry in entries]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2])
    for entry in entries:
        weighted = 2 * entry["reward/vowels"] + 0.5 * entry["reward/length"]
        assert entry["reward"] == pytest.approx(weighted)
        assert entry["ratio"] == pytest.approx(1.0, abs=1e-5)
        assert entry["completion_length_min"] <= entry["completion_length"] <= entry["completion_length_max"]
    first = json.loads(completions(place, "out").splitlines()[0])
    assert first["step"] == 1 and first["prompt"][0]["role"] == "user"
    assert first["reward"] == pytest.approx(2 * first["rewards"]["vowels"] + 0.5 * first["rewards"]["length"])


@pytest.mark.parametrize(
    ("iterations", "more", "trained"),
    [
        pytest.param(1, "scale_rewards='batch'", "", marks=pytest.mark.e2e),
        pytest.param(3, "beta=0.04, dynamic_sampling=2, loss='grpo'", "", marks=pytest.mark.e2e),
        pytest.param(1, "", ROUNDED, marks=pytest.mark.nightly),
        pytest.param(2, "beta=0.04", "LORA = None\n", marks=pytest.mark.nightly),
        pytest.param(2, "beta=0.04, loss='rloo', scale_rewards='none'", "", marks=pytest.mark.nightly),
    ],
)
def test_killed_run_ends_like_uninterrupted_run(
    iterations: int, more: str, trained: str, place: Path, lives: Lives
) -> None:
    """Kill a run between a rollout and its update, stop it within a batch, and continue it."""
    options = {
        "grpo": f"iterations={iterations}, {more}",
        "rewards": COARSE,
        "rollout": "axes={'fsdp': 1, 'tp': 2}, rows=8",
        "steps": 8,
        "every": 2,
    }
    write_reinforced(place, "whole", more=trained, **options)
    write_reinforced(place, "killed", more=trained + KILLED.format(number=3 // iterations), **options)
    undisturbed = train(lives, place, "undisturbed", artifact="whole")
    assert undisturbed.status == 0, undisturbed.stderr
    assert train(lives, place, "out", artifact="killed").status == -signal.SIGKILL
    folder = place / "out" / "checkpoints"
    assert steps(folder) == [2]
    stopped = train(lives, place, "out", "--resume", "--steps", "5", artifact="killed")
    assert stopped.status == 0, stopped.stderr
    assert steps(folder)[-1] == 5
    if iterations > 1:
        batch = f"rollouts-{5 // iterations}.npz"
        (folder / batch).rename(place / "kept")
        lost = train(lives, place, "out", "--resume", artifact="killed")
        assert lost.status == 1
        assert error_of(lost, place, "out")[0].startswith(f"error: DIRECTORY/{batch}: the completions ")
        (place / "kept").rename(folder / batch)
    end = train(lives, place, "out", "--resume", artifact="killed")
    assert end.status == 0 and "continuing after step 5 of 8" in end.stderr, end.stderr
    assert_equal(place, "undisturbed", "out", 8)
    assert metrics(place, "out") == metrics(place, "undisturbed")
    assert completions(place, "out") == completions(place, "undisturbed")
    if "dynamic_sampling" in more:
        assert sum(entry.get("groups_drawn_again", 0) for entry in metrics(place, "out")) > 0


HELD_OUT = {
    "train": "eval_every=2, generations=Generations(prompts='held_out.jsonl', max_tokens=3)",
    "data": "eval=('held_out.jsonl',)",
    "more": "CHECKPOINT = dataclasses.replace(CHECKPOINT, keep_best=True)\n",
    "rate": 2e-2,
    "steps": 6,
    "every": 100,
    "keep": 1,
}


@pytest.mark.e2e
@pytest.mark.parametrize("group", [None, 2])
def test_held_out_prompts_are_scored_at_evaluations(group: int | None, place: Path, lives: Lives) -> None:
    """Compare a run with one that continues, and its figures with the completions that it writes."""
    write_reinforced(place, "rl", grpo=f"num_generations_eval={group}", **HELD_OUT)
    whole = train(lives, place, "whole", artifact="rl")
    assert whole.status == 0, whole.stderr
    assert train(lives, place, "out", "--steps", "4", artifact="rl").status == 0
    end = train(lives, place, "out", "--resume", artifact="rl")
    assert end.status == 0, end.stderr
    assert_equal(place, "whole", "out", 6)
    assert metrics(place, "out") == metrics(place, "whole")
    folder = place / "out" / "checkpoints"
    texts = (folder / "generations.jsonl").read_text()
    assert texts == (place / "whole" / "checkpoints" / "generations.jsonl").read_text()
    answers = [json.loads(line) for line in texts.splitlines()]
    evaluated = {entry["step"]: entry for entry in metrics(place, "out") if "eval/reward" in entry}
    assert [*evaluated] == [0, 2, 4, 6]
    for step, entry in evaluated.items():
        scored = [row for row in answers if row["step"] == step and "rewards" in row]
        assert len(scored) == 5 * (group or 1)
        rewards = [row["reward"] for row in scored]
        assert entry["eval/reward"] == pytest.approx(sum(rewards) / len(rewards))
        assert entry["eval/reward_std"] == pytest.approx(statistics.stdev(rewards), abs=1e-9)
        vowels = [row["rewards"]["vowels"] for row in scored]
        assert entry["eval/reward/vowels"] == pytest.approx(sum(vowels) / len(vowels))
        asked = [row for row in answers if row["step"] == step and "rewards" not in row]
        assert len(asked) == 5
        if group is None:  # the same prompts, greedily, with shorter answers
            for short, long in zip(asked, scored, strict=True):
                assert short["prompt"] == long["prompt"] and long["answer"].startswith(short["answer"])
    best = max((2, 4, 6), key=lambda step: (evaluated[step]["eval/reward"], -step))
    assert best in steps(folder)
    assert f"eval/reward={evaluated[6]['eval/reward']:.4f}" in end.stdout


@pytest.mark.e2e
def test_failing_reward_keeps_last_step_and_run_continues_when_mended(place: Path, lives: Lives) -> None:
    """Let a function fail at its third call, although no checkpoint is due."""
    broken = REWARDS.replace("    texts", "    calls.append(1)\n    assert len(calls) < 3\n    texts")
    folder = write_reinforced(place, "rl", rewards=f"calls = []\n{broken}", steps=4, every=100)
    found = train(lives, place, "out", artifact="rl")
    assert found.status == 1
    error, help = error_of(found, place, "out")
    assert error.startswith("error: reward rewards.py:vowels raised AssertionError (rewards.py:5)")
    assert "for a completion of the prompt " in error or "completions, the first of the prompt" in error
    assert help.startswith("  = help: correct the function")
    assert steps(place / "out" / "checkpoints") == [2]
    (folder / "rewards.py").write_text(REWARDS)
    end = train(lives, place, "out", "--resume", artifact="rl")
    assert end.status == 0 and "continuing after step 2 of 4" in end.stderr, end.stderr
    assert train(lives, place, "undisturbed", artifact="rl").status == 0
    assert_equal(place, "undisturbed", "out", 4)
    assert completions(place, "out") == completions(place, "undisturbed")


def test_limits_and_rollout_may_change_between_run_and_continuation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = {"train": {"objective": "grpo", "micro_batch_size": 2, "grpo": {"num_generations": 4}}}
    began = {"reward_limits": {"seconds": 60.0}, "rollout": {"rows": None}}
    now = {"reward_limits": {"seconds": 600.0}, "rollout": {"rows": 64}}
    for name, more in (("run", began), ("artifact", now)):
        (tmp_path / name).mkdir()
        lock = {"lock": 1, "recipe": {**recipe, **more}, "model": {}, "packages": {}, "runtime": "sha256:0"}
        (tmp_path / name / "recipe.lock.json").write_text(json.dumps(lock))
    assert check_record(tmp_path / "run", tmp_path / "artifact") is None
    assert "rollout.rows was null, now 64" in capsys.readouterr().err
    changed = json.loads((tmp_path / "artifact" / "recipe.lock.json").read_text())
    changed["recipe"]["train"]["grpo"]["num_generations"] = 8
    (tmp_path / "artifact" / "recipe.lock.json").write_text(json.dumps(changed))
    with pytest.raises(UserError, match="num_generations was 4, now 8"):
        check_record(tmp_path / "run", tmp_path / "artifact")
