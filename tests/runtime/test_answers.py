"""Tests of greedy answers during training, against transformers' generate, and of their prompts."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from recipec.runtime.data.prompts import Prompts, prompts
from recipec.runtime.errors import UserError
from recipec.runtime.model.sharding import Rows
from recipec.runtime.sections import Generations
from recipec.runtime.settings import DataSettings, Source
from recipec.runtime.training.evaluation import answered, jit_answers
from tests import tiny
from tests.runtime import training
from tests.runtime.artifacts import train, write_artifact
from tests.runtime.chats import tokenizer
from tests.runtime.lives import Lives

LENGTHS = (5, 9, 2, 7, 4)
MOST = 12


def test_greedy_answers_match_transformers_generate(tmp_path: Path) -> None:
    """Answer prompts of several lengths, more than a micro-batch has rows. Some answers end early."""
    model = tiny.make_llama(tmp_path)
    random = np.random.default_rng(0)
    given = [random.integers(3, 500, length) for length in LENGTHS]
    options = {"do_sample": False, "max_new_tokens": MOST, "pad_token_id": 0}

    def generated(ends: list[int]) -> list[list[int]]:
        return [
            model.generate(torch.tensor(one[None]), eos_token_id=ends, **options)[0, len(one) :].tolist()
            for one in given
        ]

    free = generated([tiny.VOCAB - 1])
    ends = [free[0][3], free[1][6]]
    expected = generated(ends)
    assert len({len(answer) for answer in expected}) > 1
    mesh, built = training.build(tmp_path, {"fsdp": 2, "tp": 2}, full=True)
    graph, trained, base = nnx.split(built.model, nnx.Param, ...)
    tokens = np.zeros((len(given), 24), np.int32)
    for place, one in zip(tokens, given, strict=True):
        place[: len(one)] = one
    asked = Prompts(LENGTHS, tokens, np.array(LENGTHS, np.int32), MOST, tuple(ends), str)
    with mesh:
        answer = jit_answers(built.forward, lambda *parts: nnx.merge(graph, *parts), mesh, asked)
        found = answered(jax.tree_util.Partial(answer, trained, base), asked, Rows.of(mesh, 2))
    assert [one["answer"] for one in found] == list(map(str, expected))
    assert [one["ended"] for one in found] == [answer[-1] in ends for answer in expected]
    assert [one["prompt"] for one in found] == list(LENGTHS)


def read(folder: Path, *rows: Any, **changes: Any) -> Prompts:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataSettings(train=("train.jsonl",), packing=False, **{"max_length": 48, **changes})
    return prompts(Generations("prompts.jsonl", 8), data, tokenizer(), folder, {"eos_token_id": [1, 106]})


def test_prompt_tokens_match_transformers(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "one two"}]
    found = read(tmp_path, {"messages": chat}, {"prompt": chat}, {"prompt": "one two"}, max_length=4096)
    made = tokenizer()
    ids = made.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    plain = made("one two").input_ids
    for row, expected in enumerate((ids, ids, plain)):
        assert found.tokens[row, : found.lengths[row]].tolist() == expected
    assert found.tokens.shape == (3, 256), "halved as often as a length of 256 allows"
    assert {1, 106, made.eos_token_id} == set(found.ends)
    assert found.texts == [chat, chat, "one two"]


def test_columns_that_prompts_do_not_contain_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"prompt": "one two", "system": "Be brief.", "id": 3, "answer": "three"}
    found = read(tmp_path, asked, {"prompt": "<bos>one two"})
    note = "note: columns of prompts.jsonl that the prompts do not contain: system in 1"
    assert note in capsys.readouterr().err
    assert found.tokens[0].tolist() == found.tokens[1].tolist(), "one <bos>, whether the text has it or not"


def test_text_prompt_needs_no_chat_template(tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "one two"}')
    made = copy.copy(tokenizer())
    made.chat_template = None
    own = Source("train.jsonl", chat_template="{{ messages }}")
    data = DataSettings(train=(own,), packing=False, max_length=48)
    found = prompts(Generations("prompts.jsonl", 8), data, made, tmp_path, {"eos_token_id": [[1], 7]})
    assert found.texts == ["one two"] and found.ends == tuple(sorted({7, made.eos_token_id}))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3}, "prompts.jsonl:1: 'prompt' is a number, not a list"),
        ({"prompt": "\ud800"}, "prompts.jsonl:1: 'prompt' holds half a surrogate pair"),
        ({"prompt": "one " * 50}, "of an answer, and data.max_length is 48"),
        ({"text": "one"}, "prompts.jsonl:1: 'prompt' is a null, not a list"),
    ],
)
def test_invalid_or_overlong_prompt_row_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, row)


@pytest.mark.e2e
def test_a_run_writes_its_samples_at_each_evaluation(place: Path, lives: Lives) -> None:
    """Check that a resumed run writes the same samples."""
    more = """
import dataclasses

from runtime.sections import Generations

TRAIN = dataclasses.replace(TRAIN, generations=Generations("prompts.jsonl", 5))
"""
    write_artifact(place / "sampled", prelude=more)
    rows: list[Any] = [{"prompt": "one two"}, {"messages": [{"role": "user", "content": "six"}]}]
    rows *= 3
    (place / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for output, options in (("once", [[]]), ("twice", [["--steps", "6"], ["--resume"]])):
        for option in options:
            run = train(lives, place, output, *option, artifact="sampled")
            assert run.status == 0, run.stderr
    found, again = (
        [
            json.loads(line)
            for line in (place / output / "checkpoints/generations.jsonl").read_text().splitlines()
        ]
        for output in ("once", "twice")
    )
    assert [one["step"] for one in found] == [step for step in (0, 4, 8, 10) for _ in rows]
    assert [one for one in again if one["step"] != 6] == found
    assert [one["prompt"] for one in found[:2]] == ["one two", rows[1]["messages"]]
    assert all(0 < one["tokens"] <= 5 for one in found)
