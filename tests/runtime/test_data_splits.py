"""Tests of rows held out for evaluation, against the `datasets` library, and of truncated sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipec.runtime.data.prepare import PreparedData, Tokenizing, prepare
from recipec.runtime.data.sources import choose, count, open_rows, splits
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source, TrainSettings
from tests.runtime.chats import chat, tokenizer, write
from tests.runtime.data_files import KINDS
from tests.runtime.test_data_hub import NAME, TEXTS, write_cache

FIRST, SECOND = [f"verse {i}" for i in range(31)], [f"line {i}" for i in range(18)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in FIRST))
    pq.write_table(pa.table({"text": SECOND}), tmp_path / "b.parquet")
    return tmp_path


def settings(*sources: str | Source, **given: Any) -> DataSettings:
    return DataSettings(
        **{
            "packing": False,
            "train": sources,
            "max_length": 64,
            "format": "text",
            "loss_on": "all",
            "eval_fraction": 0.1,
            **given,
        }
    )


def parts(data: DataSettings, folder: Path) -> tuple[list[str], list[str]]:
    """Return the texts for training, and those for evaluation."""
    train, evaluated = splits(data, folder)
    assert evaluated is not None
    first, second = (
        [
            row.completion
            for reader in open_rows(split.sources, data, folder, split.chosen())
            for row in reader
        ]
        for split in (train, evaluated)
    )
    return first, second


def librarys(texts: list[str], fraction: float, seed: int) -> tuple[list[str], list[str]]:
    """Return the same split by datasets' train_test_split, in the order of the sources."""
    whole = datasets.Dataset.from_dict({"number": range(len(texts))})
    split = whole.train_test_split(test_size=fraction, seed=seed)
    return [texts[i] for i in sorted(split["train"]["number"])], [
        texts[i] for i in sorted(split["test"]["number"])
    ]


@pytest.mark.parametrize("rows", [2, 3, 7, 20, 101, 1999])
@pytest.mark.parametrize(("fraction", "seed"), [(0.05, 42), (0.1, 0), (1 / 3, 2**32 - 1), (0.29, 7)])
def test_held_out_rows_match_datasets_train_test_split(rows: int, fraction: float, seed: int) -> None:
    split = datasets.Dataset.from_dict({"row": range(rows)}).train_test_split(test_size=fraction, seed=seed)
    held_out = choose(rows, fraction, seed)
    assert np.flatnonzero(held_out).tolist() == sorted(split["test"]["row"])
    assert np.flatnonzero(~held_out).tolist() == sorted(split["train"]["row"])


def test_eval_fraction_that_holds_out_all_rows_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="train set will be empty"):
        datasets.Dataset.from_dict({"row": range(3)}).train_test_split(test_size=0.7)
    data = settings(Source("a.jsonl", limit=3), eval_fraction=0.7)
    with pytest.raises(UserError, match=r"eval_fraction 0.7 holds out all rows of data.train \(3\)"):
        parts(data, folder)


def test_source_limits_apply_before_the_split(folder: Path) -> None:
    data = settings(Source("a.jsonl", limit=11), Source("b.parquet", limit=40), eval_fraction=0.25)
    assert parts(data, folder) == librarys(FIRST[:11] + SECOND, 0.25, 42)


def test_dropped_rows_do_not_change_the_split_of_other_rows(folder: Path) -> None:
    """Check that a repaired row or a changed transform moves no other row."""
    whole = parts(settings("a.jsonl"), folder)
    lines = (folder / "a.jsonl").read_text().splitlines()
    lines[4] = "nonsense"
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "prepare.py").write_text("def clean(row):\n    return None if '7' in row['text'] else row\n")
    found = parts(settings("a.jsonl", transform=f"{folder / 'prepare.py'}:clean"), folder)
    for before, after in zip(whole, found, strict=True):
        assert after == [text for text in before if text != "verse 4" and "7" not in text]


@pytest.mark.parametrize("kind", KINDS)
def test_count_and_limit_work_for_every_kind_of_source(kind: str, tmp_path: Path) -> None:
    name, make, _ = KINDS[kind]
    make(tmp_path / name)
    assert [count(Source(name, limit=limit), tmp_path) for limit in (None, 7, 50, 51)] == [50, 7, 50, 50]
    data = DataSettings(train=(), max_length=64, packing=False)
    whole, first = (list(open_rows([Source(name, limit=n)], data, tmp_path)[0]) for n in (None, 7))
    assert first == whole[:7]


def test_hub_dataset_split_matches_datasets_train_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cache(tmp_path, monkeypatch)
    data = settings(Source(f"hf://{NAME}", split="train[:39]", config="short", limit=37))
    assert parts(data, Path()) == librarys(TEXTS[:37], 0.1, 42)


def test_count_works_for_split_expressions_of_local_datasets(tmp_path: Path) -> None:
    for kind in ("saved splits", "folder"):
        name, make, _ = KINDS[kind]
        make(tmp_path / name)
        for split, rows in (("test", 3), ("train[-4:]", 4), ("test+train[90%:]", 8)):
            assert count(Source(name, split=split), tmp_path) == rows


def test_a_source_that_grows_between_counting_and_reading_is_refused(folder: Path) -> None:
    data = settings("a.jsonl")
    train, _ = splits(data, folder)
    (reader,) = open_rows(train.sources, data, folder, train.chosen())
    with (folder / "a.jsonl").open("a") as file:
        file.write('{"text": "late"}\n')
    with pytest.raises(UserError, match="more rows than the 31 that were counted"):
        list(reader)


def run(folder: Path, cache: Path | None = None, **given: Any) -> PreparedData:
    train = TrainSettings(epochs=1, global_batch_size=4, micro_batch_size=1)
    data = DataSettings(
        **{"packing": False, "train": ("chats.jsonl",), "max_length": 64, "eval_fraction": 0.2, **given}
    )
    return prepare(data, train, 4, tokenizer(), folder, tokenizing=Tokenizing(cache, workers=0))


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    write(tmp_path / "chats.jsonl", [chat(f"{i}", "hello" + " the" * (i % 7)) for i in range(23)])
    write(tmp_path / "more.jsonl", [chat(f"{i}", "a world") for i in range(8)])
    return tmp_path


def origins(run: PreparedData) -> list[str]:
    return sorted(o for i in range(run.total_steps * run.accumulation) for o in run.origins(i))


def test_run_trains_on_remaining_rows_and_evaluates_on_held_out_rows(chats: Path) -> None:
    prepared = run(chats)
    held_out = np.flatnonzero(choose(23, 0.2, 42)) + 1
    assert origins(prepared) == sorted(f"chats.jsonl:{i}" for i in range(1, 24) if i not in held_out)
    assert prepared.report.train.read == 18
    assert prepared.report.eval is not None and prepared.report.eval.read == prepared.report.eval.kept == 5
    # A file with only these rows, in order, gives the same evaluation.
    lines = (chats / "chats.jsonl").read_text().splitlines(keepends=True)
    (chats / "held-out.jsonl").write_text("".join(lines[i - 1] for i in held_out))
    alone = run(chats, eval=("held-out.jsonl",), eval_fraction=None)
    assert len(prepared.eval_batches) == len(alone.eval_batches) == 2
    for ours, theirs in zip(prepared.eval_batches, alone.eval_batches, strict=True):
        assert all(np.array_equal(ours[name], theirs[name]) for name in ours)


def test_preference_pairs_are_held_out_together(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i}", "chosen": " hello", "rejected": " world"} for i in range(9)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepared = run(tmp_path, train=("pairs.jsonl",), format="preference", loss_on="completion")
    assert len(prepared.samples) == 2 * 7 and prepared.report.eval is not None
    assert prepared.report.eval.read == 2
    assert prepared.eval_batches[0]["segment_ids"].any(1).sum() == 2 * 2


def test_cache_and_fingerprint_depend_on_the_eval_split(chats: Path) -> None:
    cache = chats / "cache"
    first = run(chats, cache)
    assert len(list((cache / "data").iterdir())) == 2
    again = run(chats, cache)
    assert again.fingerprint == first.fingerprint and origins(again) == origins(first)
    assert len(list((cache / "data").iterdir())) == 2
    assert again.report.to_dict() == first.report.to_dict()
    others = [run(chats, cache, **given) for given in ({"eval_seed": 1}, {"eval_fraction": 0.1})]
    others += [
        run(chats, cache, eval_fraction=None),
        run(chats, cache, train=(Source("chats.jsonl", limit=22),)),
    ]
    assert len({first.fingerprint, *(other.fingerprint for other in others)}) == 5
    assert len(list((cache / "data").iterdir())) == 2 + 2 + 2 + 1 + 2
    assert origins(run(chats, cache, eval_seed=1)) == origins(run(chats, eval_seed=1))
