"""Tests of scoring given completions with a recipe's rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipec.compiler.explain.preview import preview, text
from recipec.compiler.explain.preview_rewards import Scored, sampled, scored
from recipec.compiler.lower import lower
from recipec.compiler.lowering.program import Program
from recipec.runtime.errors import UserError
from recipec.spec.diagnostics import render_text
from recipec.spec.load import load

RECIPE = """\
recipe: 1
name: sample
model: {id: Qwen/Qwen3-8B}
mesh: {accelerator: v6e-8, axes: {fsdp: 8}}
lora: {rank: 16}
data: {train: [prompts.jsonl], format: prompt, fields: {answer: solution}}
train: {objective: grpo, global_batch_size: 64, steps: 200}
rewards:
- {function: rewards.py:begins, weight: 2.0}
- {numeric_match: {column: answer}}
- {length: {maximum: 100}}
"""

REWARDS = """\
def begins(completions, prompts, **columns):
    assert set(columns) == {"completion_ids", "answer", "topic"}, columns
    # The second prompt is a text, and its completions are texts.
    return [None if isinstance(text, str) else float(text[0]["content"][0] == "4") for text in completions]
"""

ROWS: list[dict[str, Any]] = [
    {
        "messages": [{"role": "user", "content": "12 + 34 ="}],
        "solution": 46,
        "topic": "sums",
        "tried": ["46", "It is 40."],
    },
    {"prompt": "5 - 3 =", "solution": 2, "topic": None, "tried": ["2", "2"]},
]


def bytes_of(text: str, add_special_tokens: bool) -> dict[str, list[int]]:
    """Tokenize with one token per byte."""
    assert not add_special_tokens
    return {"input_ids": [*text.encode()]}


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    (tmp_path / "recipe.yaml").write_text(RECIPE, encoding="utf-8")
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, ROWS)), encoding="utf-8")
    lowered = lower(load(tmp_path / "recipe.yaml"))
    assert lowered.program is not None, render_text(lowered.diagnostics)
    yield lowered.program


def test_prompts_are_shown_with_the_columns_that_rewards_read(program: Program, tmp_path: Path) -> None:
    from recipec.compiler.miniature.small_checkpoint import write_tokenizer

    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_tokenizer(folder, "llama")
    shown = text(preview(program, 3, "train", folder), color=False)
    assert (
        """\
--- prompts.jsonl:1: 23 tokens
<|begin_of_text|><|start_header_id|>user<|end_header_id|>

12 + 34 =<|eot_id|><|start_header_id|>assistant<|end_header_id|>
for rewards, answer: 46
for rewards, topic: "sums"
for rewards, tried: ["46", "It is 40."]

--- prompts.jsonl:2: 8 tokens
<|begin_of_text|>5 - 3 =
for rewards, answer: 2
for rewards, topic: null
for rewards, tried: ["2", "2"]
"""
        in shown
    )
    assert "train: 2 of 2 samples kept; 31 tokens; mean length 16, longest 23\n" in shown


def test_completions_of_a_column_are_scored(program: Program, tmp_path: Path) -> None:
    preview = scored(program, "tried", bytes_of, tmp_path)
    assert (preview.completions, preview.groups) == (4, 2)
    assert preview.scores == (
        Scored("rewards.py:begins", 2.0, 0.5, 0.0, 1.0, unscored=2, alike=1),
        Scored("numeric_match", 1.0, 0.75, 0.0, 1.0, unscored=0, alike=1),
        Scored("length", 1.0, 1.0, 1.0, 1.0, unscored=0, alike=2),
    )
    lines = [*preview.lines()]
    assert lines[0] == "rewards of the 4 completions in the column tried:"
    assert lines[1] == "  2 x rewards.py:begins: mean 0.5, 0 to 1, 2 not scored"
    assert lines[4].startswith("warning: length gives every completion 1, so") and len(lines) == 5


def test_completions_of_a_file_are_scored(program: Program, tmp_path: Path) -> None:
    rows = [{**row, "completion": row["tried"][0]} for row in ROWS]
    for row in rows:
        del row["tried"]
    (tmp_path / "tries.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    preview = scored(program, "tries.jsonl", bytes_of, tmp_path)
    assert (preview.place, preview.completions, preview.groups) == ("in tries.jsonl", 2, 0)
    assert [one.mean for one in preview.scores] == [1.0, 1.0, 1.0]


def test_missing_column_and_failing_reward_are_errors(program: Program, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no column 'attempt'"):
        scored(program, "attempt", bytes_of, tmp_path)
    # Without its column among the completions, the reward sees one column more.
    (tmp_path / "tries.jsonl").write_text(json.dumps({**ROWS[0], "completion": "4"}), encoding="utf-8")
    with pytest.raises(UserError, match=r"rewards\.py:begins raised AssertionError"):
        scored(program, "tries.jsonl", bytes_of, tmp_path)


def test_completions_of_a_model_are_scored(program: Program, tmp_path: Path) -> None:
    """Let a model with random weights complete prompts, with the noise of the recipe's seed."""
    from recipec.compiler.miniature.small_checkpoint import write_tokenizer
    from tests import tiny
    from tests.runtime.test_held_out import prompts

    folder = tmp_path / "llama"
    tiny.make_llama(folder, vocab_size=512, num_hidden_layers=1)
    write_tokenizer(folder, "llama")
    train, (_, match, length) = program.recipe.train, program.recipe.rewards
    assert train.grpo is not None
    grpo = train.grpo.model_copy(update={"num_generations": 2, "max_completion_length": 5})
    changes = {"train": train.model_copy(update={"grpo": grpo}), "rewards": [match, length]}
    program = replace(program, recipe=program.recipe.model_copy(update=changes))
    preview = sampled(program, prompts(5), 3, folder, ())
    assert preview == sampled(program, prompts(5), 3, folder, ())
    assert (preview.completions, preview.groups, len(preview.shown)) == (6, 3, 4)
    assert preview.place == f"by {folder}, of the first 3 prompts at temperature 1"
    assert [one.name for one in preview.scores] == ["numeric_match", "length"]
    assert preview.scores[1].mean == 1.0 and preview.scores[0].unscored == 0
    first = next(line for line in preview.lines() if line.startswith("  0, 1: "))
    assert json.loads(first.partition(": ")[2]) in [text for text, _ in preview.shown]
