"""Tests of evaluations by rewards of held-out prompts, with a generator that only counts."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipec.runtime.data.batches import TrainingData
from recipec.runtime.data.samples import Samples
from recipec.runtime.metrics.loggers import Metrics
from recipec.runtime.model.decode import Completions
from recipec.runtime.model.sampling import GREEDY
from recipec.runtime.sections import EarlyStopping, Grpo
from recipec.runtime.settings import Reward, TrainSettings
from recipec.runtime.training.completions_scored import HeldOut, Scorer
from recipec.runtime.training.evaluation import Evaluating

GRPO = Grpo(max_prompt_length=8, max_completion_length=4)
REWARDS = (Reward("long", file="rewards.py"), Reward("exact_match", column="answer", weight=0.5))


def prompts(count: int) -> Samples:
    """Return prompts of 1, 2, ... tokens, each with its number as its answer."""
    lengths = np.arange(1, count + 1)
    rows = [json.dumps({"prompt": f"p{i}", "columns": {"answer": i}}).encode() for i in range(count)]
    return Samples(
        np.arange(lengths.sum(), dtype=np.int32),
        np.zeros(lengths.sum(), bool),
        np.concatenate([[0], np.cumsum(lengths)]),
        np.zeros(count, np.int32),
        np.array([b"x"] * count),
        columns=np.frombuffer(b"".join(rows), np.uint8),
        column_offsets=np.concatenate([[0], np.cumsum(list(map(len, rows)))]),
    )


class Counting:
    """A generator whose completions are as long as their prompts, of at most four tokens."""

    def __init__(self) -> None:
        self.calls: list[tuple[np.ndarray, Any]] = []

    def generate(self, batch: Any, sampling: Any = None) -> Completions:
        self.calls.append((batch["salts"], sampling))
        lengths = np.minimum(batch["segment_ids"].sum(1), 4).astype(np.int32)
        tokens = np.where(np.arange(4) < lengths[:, None], 7, 0).astype(np.int32)
        return Completions(tokens, lengths, np.zeros(tokens.shape, np.float32), lengths < 4)


def score(texts: list[Any], completions: list[Any], ids: list[Any], columns: dict[str, Any]) -> list[Any]:
    return [list(map(len, ids)), [None if answer == 0 else answer % 2 for answer in columns["answer"]]]


def held_out(tmp_path: Path, group: int | None, **parts: Any) -> tuple[HeldOut, Counting]:
    generator = Counting()
    scorer = Scorer(GRPO, generator, REWARDS, score, lambda ids: "x" * len(ids), 3)
    return HeldOut(prompts(5), parts, group, scorer, Metrics(tmp_path, None, False)), generator


@pytest.mark.parametrize("group", [None, 3])
def test_rewards_of_held_out_prompts(group: int | None, tmp_path: Path) -> None:
    evaluated, generator = held_out(tmp_path, group, one=[0, 1], two=[2, 3, 4])
    found = evaluated.evaluate(10)
    long = [float(min(i + 1, 4)) for i in range(5) for _ in range(group or 1)]
    odd = [float(i % 2) for i in range(1, 5) for _ in range(group or 1)]
    rewards = [
        length + 0.5 * (i // (group or 1) % 2 if i >= (group or 1) else 0) for i, length in enumerate(long)
    ]
    assert found["reward"] == pytest.approx(statistics.mean(rewards))
    assert found["reward_std"] == pytest.approx(statistics.stdev(rewards))
    assert found["reward/long"] == pytest.approx(statistics.mean(long))
    assert found["reward/exact_match"] == pytest.approx(statistics.mean(odd))
    assert found["reward_std/exact_match"] == pytest.approx(statistics.stdev(odd))
    assert found["one/reward"] == pytest.approx(statistics.mean(rewards[: 2 * (group or 1)]))
    assert found["completion_length"] == pytest.approx(statistics.mean(long))
    assert found["truncated_share"] == pytest.approx(2 / 5)
    shown = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in shown] == [f"p{i}" for i in range(5) for _ in range(group or 1)]
    assert shown[0]["rewards"] == {"long": 1.0, "exact_match": None} and shown[0]["step"] == 10
    evaluated.evaluate(20)
    (first, how), (second, _) = generator.calls
    assert how == (GREEDY if group is None else None)
    assert len(set(first.tolist())) == 5 * (group or 1)
    np.testing.assert_array_equal(first, second)


def test_best_evaluation_has_the_highest_reward() -> None:
    said: list[str] = []
    logged: list[Any] = []
    report: Any = SimpleNamespace(
        metrics=SimpleNamespace(log=lambda *numbers: logged.append(numbers)), say=said.append
    )
    rewards = iter([0.25, 0.5, 0.5, 0.4])
    train = TrainSettings(
        global_batch_size=1, micro_batch_size=1, eval_every=2, early_stopping=EarlyStopping(patience=2)
    )
    data = TrainingData(
        batches=lambda step: (), evaluate=lambda step: {"reward": next(rewards), "reward/a": 1}
    )
    assert data.evaluates and not replace(data, evaluate=None).evaluates
    kept: Any = SimpleNamespace(best=None)
    evaluating = Evaluating(lambda _: 0.0, lambda _: [], data, report, train, None, kept)
    best = [evaluating.count(step, evaluating.run(step)) for step in (2, 4, 6, 8)]
    assert best == [True, True, False, False] and kept.best == 4
    assert evaluating.ends
    assert evaluating.sentence(8).endswith(
        "no progress in 2 evaluations; eval/reward was highest, 0.5000, at 4"
    )
    assert said[0] == "step 2: eval/reward 0.2500 (reward/a 1)"
    assert logged[1] == ("eval", 4, {"reward": 0.5, "reward/a": 1})
