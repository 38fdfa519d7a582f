"""Tests of sources of several formats in one run: each is read, renamed and masked as if it were alone."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.data.prepare import PreparedData, Tokenizing, prepare
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source, TrainSettings
from tests.runtime.chats import MARKED, tokenizer, write
from tests.runtime.preparing import conversations

SHOUT = "def loud(row):\n    return None if row['a'] == 'skip' else {'q': row['q'], 'a': row['a'].upper()}\n"
OTHER = MARKED.replace("<|turn>model", "<|turn>fox")
SOURCES = (
    "chats.jsonl",
    Source("prose.jsonl", format="text", fields={"text": "body"}, loss_on="all"),
    Source(
        *("asked.jsonl", 2.0),
        format="prompt_completion",
        fields={"prompt": "q", "completion": "a"},
        transform="shout.py:loud",
        loss_on="completion",
    ),
    Source("more.jsonl", loss_on="last_assistant", chat_template=OTHER),
)


def lines(path: Path, rows: list[Any]) -> None:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "chats.jsonl", conversations(9))
    write(tmp_path / "more.jsonl", conversations(7, seed=2))
    lines(tmp_path / "prose.jsonl", [{"body": f"the {n} fox says hello " * (n % 3 + 1)} for n in range(8)])
    asked = [{"q": f"quick {n}?", "a": "skip" if n == 2 else f" brown {n}"} for n in range(6)]
    lines(tmp_path / "asked.jsonl", asked)
    (tmp_path / "shout.py").write_text(SHOUT)
    return tmp_path


def run(folder: Path, data: DataSettings, cache: Path | None = None) -> PreparedData:
    train = TrainSettings(epochs=1, global_batch_size=4, micro_batch_size=1)
    return prepare(data, train, 4, tokenizer(), folder, tokenizing=Tokenizing(cache))


MIXED = DataSettings(train=SOURCES, max_length=96, packing=True)


def test_mixed_sources_give_the_same_samples_as_each_source_alone(folder: Path) -> None:
    whole = run(folder, MIXED)
    at = 0
    for number, source in enumerate(SOURCES):
        held = MIXED.of(source)
        path = source if isinstance(source, str) else source.path
        alone = run(folder, replace(held, train=(path,))).samples
        for sample in alone:
            assert np.array_equal(whole.samples[at].tokens, sample.tokens)
            assert np.array_equal(whole.samples[at].targets, sample.targets)
            assert whole.samples.sources[at] == number
            at += 1
    assert at == len(whole.samples) == 9 + 8 + 5 + 7
    texts = [tokenizer().decode(sample.tokens) for sample in whole.samples]
    assert "BROWN 3" in texts[9 + 8 + 2] and "<|turn>" not in texts[9 + 8 + 2]
    assert ["<|turn>fox\n" in text for text in texts] == [False] * (9 + 8 + 5) + [True] * 7
    # A conversation with two answers: both carry loss in the first source, and one in the last.
    first, last = whole.samples[0].targets, whole.samples[9 + 8 + 5].targets
    assert [np.count_nonzero(np.diff(each.astype(int)) == 1) for each in (first, last)] == [2, 1]


def test_row_of_another_format_than_its_source_is_reported(folder: Path) -> None:
    odd: list[Any] = [
        {"body": "fine"},
        {"messages": [{"content": "no role"}]},
        {"body": [["nested"]]},
        '"text"',
    ]
    lines(folder / "prose.jsonl", odd)
    odd = [{"q": "x", "a": " y"}, {"q": ["list"], "a": "y"}]
    lines(folder / "asked.jsonl", odd)
    (folder / "shout.py").write_text("def loud(row):\n    return row\n")
    report = run(folder, replace(MIXED, max_invalid_ratio=1.0)).report.train
    assert [f"{found.origin}: {found.reason}" for found in report.malformed.first] == [
        "prose.jsonl:2: no 'body' (it has 'messages')",
        "prose.jsonl:3: 'body' is a list, not a string",
        "prose.jsonl:4: a string, not an object",
        "asked.jsonl:2: 'q' is a list and 'a' a string: both are text, or both are lists of messages",
    ]
    lines(folder / "prose.jsonl", [{"messages": [{"content": "no role"}]}])
    with pytest.raises(
        UserError, match=r"prose.jsonl is of the format text: the first, prose.jsonl:1: no 'body'"
    ):
        run(folder, MIXED)


@pytest.mark.parametrize(
    "change",
    [
        {"loss_on": "last_assistant"},
        {"chat_template": OTHER},
        {"transform": "id.py:same"},
    ],
)
def test_source_settings_change_the_data_cache_entry(folder: Path, change: dict[str, Any]) -> None:
    (folder / "id.py").write_text("def same(row):\n    return row\n")
    cache = folder / "cache"
    first = run(folder, MIXED, cache)
    changed = replace(MIXED, train=(Source("chats.jsonl", **change), *SOURCES[1:]))
    again = run(folder, changed, cache)
    assert len(list((cache / "data").iterdir())) == 2
    assert (first.fingerprint == again.fingerprint) == change.keys().isdisjoint(("loss_on", "chat_template"))


def test_source_templates_replace_a_missing_tokenizer_template(folder: Path) -> None:
    bare = copy.deepcopy(tokenizer())  # all tests share the original
    bare.chat_template = None
    train = TrainSettings(epochs=1, global_batch_size=4, micro_batch_size=1)
    own = tuple(Source("more.jsonl", chat_template=OTHER) if one == "chats.jsonl" else one for one in SOURCES)
    assert len(prepare(replace(MIXED, train=own), train, 4, bare, folder).samples) == 7 + 8 + 5 + 7
    with pytest.raises(UserError, match="the tokenizer has no chat template"):
        prepare(MIXED, train, 4, bare, folder)
