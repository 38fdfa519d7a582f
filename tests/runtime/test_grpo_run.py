"""Tests of a train.py that learns from rewards of its own completions: finished, stopped and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runtime.artifacts import train
from tests.runtime.lives import Lives
from tests.runtime.reinforced import write_reinforced


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_run_learns_from_rewards(place: Path, lives: Lives) -> None:
    write_reinforced(place, "rl", rate=2e-2, steps=8)
    found = train(lives, place, "out", artifact="rl")
    assert found.status == 0, found.stderr
    entries = metrics(place / "out" / "checkpoints")
    rewards = [entry["reward"] for entry in entries]
    assert len(rewards) == 8
    assert sum(rewards[-2:]) > sum(rewards[:2])
