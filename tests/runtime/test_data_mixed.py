"""Tests of sources of several formats in one run: each is read, renamed and masked as if it were alone."""

from __future__ import annotations

import copy
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.data.epochs import tempered
from recipec.runtime.data.prepare import PreparedData, Tokenizing, prepare
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source, TrainSettings
from tests.runtime.chats import MARKED, tokenizer, write
from tests.runtime.preparing import conversations, prepared, same

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
    "change", [{"loss_on": "last_assistant"}, {"chat_template": OTHER}, {"transform": "id.py:same"}]
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


@pytest.fixture
def ordered(tmp_path: Path) -> Path:
    for name, count in (("a", 90), ("b", 9), ("c", 1)):
        write(tmp_path / f"{name}.jsonl", conversations(count, seed=count))
    return tmp_path


ALL = ("a.jsonl", "b.jsonl", "c.jsonl")


@pytest.mark.parametrize(
    ("temperature", "expected"),
    # 100 x sizes ** (1 / T) over their sum, computed by hand: 9.487, 3 and 1 of 13.487 for T = 2.
    [(2.0, [70, 22, 7]), (1e9, [33, 33, 33]), (0.5, [99, 1, 1])],
)
def test_temperature_sets_the_share_of_each_source_in_an_epoch(
    ordered: Path, temperature: float, expected: list[int]
) -> None:
    run = prepared(ordered, train=ALL, temperature=temperature, rows=1, batch=1, epochs=2)
    for epoch in range(2):
        steps = range(epoch * run.steps_per_epoch, (epoch + 1) * run.steps_per_epoch)
        lines = Counter(run.origins(step)[0] for step in steps)
        assert [sum(n for o, n in lines.items() if o.startswith(name[0])) for name in ALL] == expected
        for name, size in zip(ALL, (90, 9, 1), strict=True):
            times = [lines[f"{name}:{i + 1}"] for i in range(size)]
            assert max(times) - min(times) <= 1  # each row of a source comes once before any comes again


def test_tempered_weight_of_an_empty_source_is_zero() -> None:
    assert tempered([0, 4, 4], 7.0) == [0.0, 1.0, 1.0]


def test_a_temperature_of_one_changes_nothing(ordered: Path) -> None:
    plain, one = (prepared(ordered, train=ALL, temperature=t, packing=True) for t in (None, 1.0))
    assert plain.fingerprint == one.fingerprint
    assert all(same(x, y) for x, y in zip(plain.batches(), one.batches(), strict=True))


@pytest.mark.parametrize("seed", [0, None])
def test_a_curriculum_goes_from_short_to_long_in_each_epoch(ordered: Path, seed: int | None) -> None:
    run = prepared(ordered, train=ALL, curriculum="length", shuffle_seed=seed, rows=2, batch=4, epochs=3)
    orders = []
    for epoch in range(3):
        size = run.steps_per_epoch * run.accumulation
        batches = [run.micro_batch(i) for i in range(epoch * size, (epoch + 1) * size)]
        lengths = [n for b in batches for n in (b["segment_ids"] > 0).sum(1).tolist() if n]
        assert len(lengths) == 100 and lengths == sorted(lengths)
        orders.append([o for i in range(epoch * size, (epoch + 1) * size) for o in run.origins(i)])
    # A seed changes the order of samples of equal length.
    assert (orders[0] == orders[1]) == (seed is None) and sorted(orders[0]) == sorted(orders[1])


def test_resume_with_temperature_or_curriculum_gives_the_same_batches(ordered: Path) -> None:
    for settings in ({"temperature": 3.0, "packing": True}, {"curriculum": "length", "temperature": 3.0}):
        whole = list(prepared(ordered, train=ALL, **settings).batches())
        again = prepared(ordered, train=ALL, **settings)
        rest = list(again.batches(start=2))
        assert all(same(x, y) for x, y in zip(whole[2 * again.accumulation :], rest, strict=True))
    prints = [
        prepared(ordered, train=ALL, **settings).fingerprint
        for settings in ({}, {"curriculum": "length"}, {"temperature": 2.0}, {"temperature": 3.0})
    ]
    assert len(set(prints)) == 4
    weighted = tuple(
        Source(name, weight) for name, weight in zip(ALL, tempered([90, 9, 1], 2.0), strict=True)
    )
    assert prepared(ordered, train=weighted).fingerprint == prints[2]
    assert np.isclose(sum(w * n for w, n in zip(tempered([90, 9, 1], 2.0), (90, 9, 1), strict=True)), 99)
