"""Tests of what a run says about rewards that cannot compare, or that are all the same."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from recipec.runtime.data.samples import Samples
from recipec.runtime.errors import UserError
from recipec.runtime.reinforcement.comparable import check_answers
from recipec.runtime.settings import Reward
from recipec.runtime.training.rollouts import FLAT, FlatBatches


def prompts(*answers: object) -> Samples:
    """Return a prompt for each answer of the column `answer`."""
    texts = [json.dumps({"prompt": "a", "columns": {"answer": answer}}).encode() for answer in answers]
    count = len(texts)
    return Samples(
        np.zeros(count, np.int32),
        np.zeros(count, bool),
        np.arange(count + 1),
        np.zeros(count, np.int32),
        np.asarray([f"rows.jsonl:{number}".encode() for number in range(1, count + 1)]),
        columns=np.frombuffer(b"".join(texts), np.uint8),
        column_offsets=np.cumsum([0, *map(len, texts)]),
    )


@pytest.mark.parametrize(
    ("reward", "answers", "error"),
    [
        ("numeric_match", ("#### 4", None, "5"), "1 of 3 prompts have no answer to compare with"),
        ("numeric_match", (1, "two", "many"), "2 of 3 prompts"),
        ("exact_match", (None, "b"), "rows.jsonl:1: the column is missing or null"),
        ("code_tests", (["assert f()"], 3), "rows.jsonl:2: the tests '3' are not texts"),
    ],
)
def test_prompts_without_an_answer_end_the_run_before_it_begins(
    reward: str, answers: tuple[object, ...], error: str
) -> None:
    with pytest.raises(UserError) as raised:
        check_answers([Reward("length"), Reward(reward, column="answer")], prompts(*answers))
    assert error in raised.value.message
    assert "returns None for them" in (raised.value.help or "")


def test_a_column_with_the_name_of_an_argument_is_refused() -> None:
    samples = prompts(1, 2)
    text = json.dumps({"prompt": "a", "columns": {"answer": 1, "completions": []}}).encode()
    renamed = replace(
        samples,
        columns=np.frombuffer(bytes(samples.columns[: samples.column_offsets[1]]) + text, np.uint8),
        column_offsets=np.array([0, samples.column_offsets[1], samples.column_offsets[1] + len(text)]),
    )
    with pytest.raises(UserError, match=r"rows\.jsonl:2: the column completions has the name of an argument"):
        check_answers([Reward("length")], renamed)


def test_own_functions_and_whole_answers_are_accepted() -> None:
    check_answers([Reward("own", file="rewards.py")], prompts(None))
    check_answers([Reward("numeric_match", column="answer")], prompts("#### 72", 3.5, "1,000"))


def test_batches_without_a_difference_are_warned_of_once() -> None:
    flat, varied = np.array([[1.0, 1.0], [0.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 1.0]])
    counting = FlatBatches()
    first = [counting.add(rewards) for rewards in [flat] * (FLAT - 1) + [varied]]
    assert first == [None] * FLAT
    later = [counting.add(flat) for _ in range(3 * FLAT)]
    assert [warning is not None for warning in later] == [number == FLAT - 1 for number in range(3 * FLAT)]
    assert "frac_reward_zero_std" in str(later[FLAT - 1])
