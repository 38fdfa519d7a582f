"""Tests of sampling by temperature and of epochs from short to long, also in a resumed run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from recipec.runtime.data.tempering import tempered
from recipec.runtime.settings import Source
from tests.runtime.chats import write
from tests.runtime.preparing import conversations, prepared, same


@pytest.fixture
def folder(tmp_path: Path) -> Path:
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
    folder: Path, temperature: float, expected: list[int]
) -> None:
    run = prepared(folder, train=ALL, temperature=temperature, rows=1, batch=1, epochs=2)
    for epoch in range(2):
        steps = range(epoch * run.steps_per_epoch, (epoch + 1) * run.steps_per_epoch)
        lines = Counter(run.origins(step)[0] for step in steps)
        assert [sum(n for o, n in lines.items() if o.startswith(name[0])) for name in ALL] == expected
        for name, size in zip(ALL, (90, 9, 1), strict=True):
            times = [lines[f"{name}:{i + 1}"] for i in range(size)]
            assert max(times) - min(times) <= 1  # each row of a source comes once before any comes again


def test_tempered_weight_of_an_empty_source_is_zero() -> None:
    assert tempered([0, 4, 4], 7.0) == [0.0, 1.0, 1.0]


def test_a_temperature_of_one_changes_nothing(folder: Path) -> None:
    plain, one = (prepared(folder, train=ALL, temperature=t, packing=True) for t in (None, 1.0))
    assert plain.fingerprint == one.fingerprint
    assert all(same(x, y) for x, y in zip(plain.batches(), one.batches(), strict=True))


@pytest.mark.parametrize("seed", [0, None])
def test_a_curriculum_goes_from_short_to_long_in_each_epoch(folder: Path, seed: int | None) -> None:
    run = prepared(folder, train=ALL, curriculum="length", shuffle_seed=seed, rows=2, batch=4, epochs=3)
    orders = []
    for epoch in range(3):
        size = run.steps_per_epoch * run.accumulation
        batches = [run.micro_batch(i) for i in range(epoch * size, (epoch + 1) * size)]
        lengths = [n for b in batches for n in (b["segment_ids"] > 0).sum(1).tolist() if n]
        assert len(lengths) == 100 and lengths == sorted(lengths)
        orders.append([o for i in range(epoch * size, (epoch + 1) * size) for o in run.origins(i)])
    # A seed changes the order of samples of equal length.
    assert (orders[0] == orders[1]) == (seed is None) and sorted(orders[0]) == sorted(orders[1])


def test_resume_with_temperature_or_curriculum_gives_the_same_batches(folder: Path) -> None:
    for settings in ({"temperature": 3.0, "packing": True}, {"curriculum": "length", "temperature": 3.0}):
        whole = list(prepared(folder, train=ALL, **settings).batches())
        again = prepared(folder, train=ALL, **settings)
        rest = list(again.batches(start=2))
        assert all(same(x, y) for x, y in zip(whole[2 * again.accumulation :], rest, strict=True))
    prints = [
        prepared(folder, train=ALL, **settings).fingerprint
        for settings in ({}, {"curriculum": "length"}, {"temperature": 2.0}, {"temperature": 3.0})
    ]
    assert len(set(prints)) == 4
    weighted = tuple(
        Source(name, weight) for name, weight in zip(ALL, tempered([90, 9, 1], 2.0), strict=True)
    )
    assert prepared(folder, train=weighted).fingerprint == prints[2]
    assert np.isclose(sum(w * n for w, n in zip(tempered([90, 9, 1], 2.0), (90, 9, 1), strict=True)), 99)
