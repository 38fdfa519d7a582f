"""Artifacts that learn from rewards of their own completions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.runtime.artifacts import write_artifact

PRELUDE = """
import dataclasses

from runtime.reinforcement.rewards import Reward
from runtime.sections import Generations, Grpo, RewardLimits, Rollout

DATA = DataSettings(train=("prompts.jsonl",), format="prompt", max_length=48, packing=False, {data})
GRPO = Grpo(num_generations=4, max_prompt_length=32, max_completion_length=16, temperature=5.0, {grpo})
TRAIN = dataclasses.replace(TRAIN, objective="grpo", grpo=GRPO, global_batch_size=16, {train})
LORA = dataclasses.replace(LORA, dropout=0.0)
REWARDS = (
    Reward("vowels", file=str(ARTIFACT / "rewards.py"), weight=2.0),
    Reward("length", options={{"minimum": 2, "maximum": 40}}, weight=0.5),
)
{more}
"""

ARGUMENTS = """
            rewards=REWARDS,
            reward_limits=RewardLimits(seconds=60),
            rollout=Rollout({rollout}),"""

REWARDS = """
def vowels(completions, answer, **columns):
    texts = [completion[0]["content"] for completion in completions]
    return [sum(letter in "aeiou " for letter in text) / max(1, len(text)) for text in texts]
"""


def write_reinforced(
    place: Path,
    name: str = "artifact",
    grpo: str = "",
    train: str = "",
    data: str = "",
    rollout: str = "",
    more: str = "",
    rewards: str = REWARDS,
    **changes: Any,
) -> Path:
    """Write prompts.jsonl and held_out.jsonl, and an artifact with rewards.py.

    Args:
        grpo, train, data, rollout: arguments of these settings, each with a comma.
        more: code.
        changes: as for write_artifact.
    """
    words = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [
        {"messages": [{"role": "user", "content": " ".join(words[: 1 + i % 5])}], "answer": i}
        for i in range(10)
    ]
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = [{"messages": [{"role": "user", "content": f"count {word}"}], "answer": 0} for word in words[:5]]
    (place / "held_out.jsonl").write_text("".join(json.dumps(row) + "\n" for row in asked))
    prelude = PRELUDE.format(grpo=grpo, train=train, data=data, more=more)
    write_artifact(place / name, prelude=prelude, arguments=ARGUMENTS.format(rollout=rollout), **changes)
    (place / name / "rewards.py").write_text(rewards)
    return place / name
