"""Tests of samples that are evaluated and trained on or in several sources, and of undrawn sources."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from recipec.runtime.data.samples import repeated
from recipec.runtime.settings import Source
from tests.runtime.chats import write
from tests.runtime.preparing import conversations, prepared


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rows = conversations(60)
    write(tmp_path / "train.jsonl", rows[:50])
    write(tmp_path / "mixed.jsonl", [*rows[40:60], rows[59]])
    write(tmp_path / "new.jsonl", rows[50:])
    return tmp_path


@pytest.mark.parametrize("packing", [False, True])
def test_evaluation_samples_that_are_trained_on_are_counted(folder: Path, packing: bool) -> None:
    """Use another file, so that neither names nor lines tell it."""
    run = prepared(folder, eval=("mixed.jsonl",), packing=packing)
    assert run.report.eval is not None and run.report.eval.shared == 10
    text = run.report.text()
    assert "warning: 10 of the 21 evaluation samples are also trained on: their loss says nothing" in text
    assert json.loads(json.dumps(run.report.to_dict()))["eval"]["shared"] == 10
    whole = prepared(folder, eval=("train.jsonl",)).report.text()
    assert "warning: all 50 evaluation samples are also trained on" in whole
    assert "trained on" not in prepared(folder, eval=("new.jsonl",)).report.text()
    assert "trained on" not in prepared(folder, eval_fraction=0.2).report.text()


def test_parts_of_a_saved_data_set_are_compared_row_by_row(folder: Path) -> None:
    import datasets

    rows = [{"messages": row} for row in conversations(40)]
    datasets.Dataset.from_list(rows).save_to_disk(str(folder / "set"))
    train = (Source("set", split="train[:50%]"),)
    run = prepared(folder, train=train, eval=(Source("set", split="train[40%:60%]"),))
    assert run.report.eval is not None and run.report.eval.shared == 4


def test_samples_of_two_training_sources_are_noted(folder: Path) -> None:
    run = prepared(folder, train=("train.jsonl", "mixed.jsonl", "new.jsonl"))
    assert list(run.report.notes) == [
        "10 samples of data.train[1], mixed.jsonl, are also in data.train[0], train.jsonl",
        "10 samples of data.train[2], new.jsonl, are also in data.train[1], mixed.jsonl",
    ]
    assert not prepared(folder, train=("train.jsonl", "new.jsonl")).report.notes
    assert not prepared(folder, train=("mixed.jsonl",)).report.notes  # a duplicate within a source


def test_repeated_groups_are_counted_for_the_first_source() -> None:
    found = np.array([5, 7, 5, 9, 5, 7, 7], np.uint64)
    sources = np.array([0, 0, 0, 1, 1, 2, 2])
    assert repeated(found, sources) == {(0, 1): 1, (0, 2): 2}
    assert repeated(found[:0], sources[:0]) == {}


def test_fingerprints_tell_apart_the_border_between_two_answers(folder: Path) -> None:
    samples = prepared(folder).samples
    assert len(set(samples.fingerprints.tolist())) == len(samples) == 50
    from dataclasses import replace

    moved = samples.offsets.copy()
    moved[1] += 1
    pairs, other = (
        replace(samples, offsets=offsets, group=2).fingerprints for offsets in (samples.offsets, moved)
    )
    assert (pairs != other).tolist() == [True] + [False] * 24


def test_source_that_is_never_drawn_is_noted_with_its_numbers(folder: Path) -> None:
    small = write(folder / "small.jsonl", conversations(3, seed=7))
    light = prepared(folder, train=("train.jsonl", Source(small, weight=0.1)))
    assert list(light.report.notes) == [
        "data.train[1], small.jsonl, is never drawn: 0.1 of its 3 samples is 0.3, which rounds to none; "
        "raise its weight"
    ]
    assert not prepared(folder, train=("train.jsonl", Source(small, weight=0.34))).report.notes
    short = prepared(folder, train=("train.jsonl", small), epochs=None, steps=1, batch=4, shuffle_seed=None)
    assert list(short.report.notes) == [
        "data.train[1], small.jsonl, is never drawn: none of its 3 samples is in the run's 1 steps, of 14 "
        "an epoch"
    ]
    long = write(
        folder / "long.jsonl",
        [[{"role": "user", "content": "fox " * 200}, {"role": "assistant", "content": "a"}]],
    )
    kept = prepared(folder, train=("train.jsonl", long))
    assert list(kept.report.notes) == [
        "data.train[1], long.jsonl, has no usable sample, so the run does not train on it"
    ]


def test_stream_compares_each_window(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"stream_window": 25, "shuffle_seed": None, "epochs": None, "steps": 10, "rows": 1, "batch": 5}
    run = prepared(folder, eval=("mixed.jsonl",), **settings)
    assert run.report.eval is not None and run.report.eval.shared == 0
    run.micro_batch(45)
    run.close()
    assert "note: 10 of the 21 evaluation samples are also trained on, in window 2 of the stream" in (
        capsys.readouterr().err
    )
    rare = prepared(folder, train=("train.jsonl", Source("new.jsonl", weight=0.001)), **settings)
    rare.close()
    assert list(rare.report.notes) == [
        "data.train[1], new.jsonl, is hardly drawn: its weight gives it 0.05 of the about 50 samples of the "
        "run; raise its weight"
    ]
