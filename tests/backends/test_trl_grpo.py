"""Tests of train_trl.py's runs that learn from rewards, on the CPU, with completions by transformers.

tests/runtime/test_grpo_parity.py compares its trainer with train.py's, from the same completions.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from recipec.compiler.lowering.backend import Backend
from tests.parity.running import Case, Place

CASE = Case(
    "meta-llama/Llama-3.1-8B-Instruct",
    ["full_attention"],
    {
        "mesh": {"accelerator": "cpu-1", "axes": {"fsdp": 1}},
        "remat": {"policy": "none"},
        "lora": {"rank": 4, "dropout": 0.0, "targets": ["q_proj", "v_proj"]},
        "data": {"train": ["train.jsonl"], "format": "prompt", "max_length": 72, "packing": False},
        "train": {
            "objective": "grpo",
            "grpo": {
                "num_generations": 4,
                "max_prompt_length": 64,
                "max_completion_length": 8,
                "beta": 0.04,
                "overlong_penalty": 2,
            },
            "steps": 3,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "optimizer": {"learning_rate": 0.01, "max_grad_norm": 1.0},
            "schedule": {"name": "constant"},
            "log": {"every": 1, "tensorboard": False},
        },
        "rewards": [{"function": "rewards.py:low"}, {"length": {"maximum": 6}, "weight": 0.5}],
        "checkpoint": {"directory": "checkpoints", "every_steps": 1, "keep": 3},
    },
)
REWARDS = '''\
"""A reward of tokens."""


def low(completion_ids, prompts, **columns):
    """Return the share of tokens with a number below 100."""
    assert all(messages[0]["role"] == "user" for messages in prompts)
    return [sum(token < 100 for token in tokens) / len(tokens) for tokens in completion_ids]
'''


@pytest.mark.e2e
def test_a_run_learns_from_rewards_and_is_resumed_exactly(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARDS)
    place = Place(tmp_path, CASE, (Backend.TUNIX, Backend.TRL))
    script, data = "baseline/train_trl.py", ("--data-dir", tmp_path)
    place.run(script, "whole", *data)
    place.run(script, "cut", *data, "--steps", "2")
    place.run(script, "cut", *data, "--resume")
    whole, cut = (steps(place.logged(name)) for name in ("whole", "cut"))
    assert whole == cut and [entry["step"] for entry in whole] == [1, 2, 3]
    for entry in whole:
        assert 0 <= entry["reward/low"] <= 1 and 0 <= entry["reward/length"] <= 1
        assert 1 <= entry["completion_length"] <= 8 and "kl" in entry and "reward/overlong_penalty" in entry
        parts = entry["reward/low"] + 0.5 * entry["reward/length"] + entry["reward/overlong_penalty"]
        assert entry["reward"] == pytest.approx(parts, abs=1e-5)
    one, other = (
        load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("whole", "cut")
    )
    assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)
    assert any(np.abs(array).max() > 0 for key, array in one.items() if "lora_B" in key)


def steps(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of steps, without values that differ from run to run."""
    return [
        {name: value for name, value in entry.items() if "second" not in name and "memory" not in name}
        for entry in entries
        if "loss" in entry
    ]
