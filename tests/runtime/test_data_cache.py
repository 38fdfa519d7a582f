"""Tests of tokenizing in several processes and of cached tokenized data: the samples are always the same."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.data import token_cache as caching
from recipec.runtime.data import workers
from recipec.runtime.data.encoding import coding
from recipec.runtime.data.prepare import PreparedData, Tokenizing, prepare
from recipec.runtime.data.samples import Samples
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, TrainSettings
from tests.runtime.chats import GEMMA4, chat, tokenizer, write
from tests.runtime.preparing import conversations

TRAIN = TrainSettings(epochs=1, global_batch_size=4, micro_batch_size=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", conversations(90))
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("nonsense\n" + json.dumps({"messages": chat("hello", "the " * 200)}) + "\n")
    write(tmp_path / "more.jsonl", conversations(30, seed=1))
    return tmp_path


def prepared(
    folder: Path, cache: Path | None = None, workers: int | None = 0, **settings: Any
) -> PreparedData:
    data = DataSettings(
        **{"packing": False, "train": ("train.jsonl", "more.jsonl"), "max_length": 96, **settings}
    )
    return prepare(data, TRAIN, 4, tokenizer(), folder, tokenizing=Tokenizing(cache, workers))


def equal(a: PreparedData, b: PreparedData) -> bool:
    return (
        all(
            np.array_equal(getattr(a.samples, item.name), getattr(b.samples, item.name))
            for item in fields(Samples)
        )
        and a.report.to_dict() == b.report.to_dict()
        and a.fingerprint == b.fingerprint
    )


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CHUNK", 16 * workers.PER_SAMPLE)


def test_tokenizing_process_count_does_not_change_the_samples(folder: Path, small_chunks: None) -> None:
    alone = prepared(folder)
    assert alone.report.train.overlong.first[0].origin == "train.jsonl:92"
    assert alone.samples.origin(len(alone.samples) - 1) == "more.jsonl:30"
    assert equal(prepared(folder, workers=2), alone)


def test_tokenizing_starts_processes_only_for_many_rows(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []
    start = workers._Pool._start
    monkeypatch.setattr(workers._Pool, "_start", lambda pool: started.append(1) or start(pool))
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    few = prepared(folder, workers=None)
    assert not started
    monkeypatch.setattr(workers, "CHUNK", 8 * workers.PER_SAMPLE)
    monkeypatch.setattr(workers, "ALONE", 32 * workers.PER_SAMPLE)
    assert equal(prepared(folder, workers=None), few)
    assert len(started) == 2


def test_user_error_in_a_tokenizing_process_reaches_the_user(folder: Path, small_chunks: None) -> None:
    with pytest.raises(UserError, match=r"train.jsonl:92 has \d+ tokens, and data.max_length is 96"):
        prepared(folder, workers=2, overlong="error")


def test_dead_tokenizing_process_is_reported(
    folder: Path, small_chunks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "_PROGRAM", "import os; os._exit(9)")
    with pytest.raises(UserError, match=r"a tokenizing process ended unexpectedly \(exit status 9\)"):
        prepared(folder, workers=2)


def no_tokenizing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("it was tokenized again")

    monkeypatch.setattr("recipec.runtime.data.prepare.tokenize", refuse)


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "data").iterdir())


def test_a_second_run_tokenizes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = folder / "cache"
    first = prepared(folder, cache)
    assert equal(first, prepared(folder))
    (entry,) = kept(cache)
    assert (entry / "split.json").is_file()
    no_tokenizing(monkeypatch)
    again = prepared(folder, cache)
    assert equal(again, first)
    assert "malformed" in again.report.text() and again.report.text() == first.report.text()
    # The cache key includes neither the order of an epoch nor the limit of invalid rows.
    prepared(folder, cache, shuffle_seed=5, packing=True)
    with pytest.raises(UserError, match="max_invalid_ratio"):
        prepared(folder, cache, max_invalid_ratio=0.0)


@pytest.mark.parametrize("change", ["data", "template", "length", "tokenizer"])
def test_changed_data_or_settings_are_tokenized_again(
    folder: Path, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = folder / "cache"
    prepared(folder, cache)
    settings: dict[str, Any] = {}
    if change == "data":
        path = folder / "more.jsonl"
        path.write_text(path.read_text().replace("the", "THE", 1))
    elif change == "template":
        settings = {"chat_template": GEMMA4.replace("<|turn>model", "<|turn>Model")}
    elif change == "length":
        settings = {"max_length": 95}
    else:
        other = tokenizer(GEMMA4, True)
        monkeypatch.setitem(globals(), "tokenizer", lambda: other)
    changed = prepared(folder, cache, **settings)
    assert len(kept(cache)) == 2
    assert equal(changed, prepared(folder, **settings))


@pytest.mark.parametrize("damage", ["truncated", "changed", "no report"])
def test_damaged_cache_entry_is_rebuilt_and_reported(
    folder: Path, damage: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = folder / "cache"
    first = prepared(folder, cache)
    (entry,) = kept(cache)
    tokens = entry / "tokens.npy"
    content = tokens.read_bytes()
    if damage == "truncated":
        tokens.write_bytes(content[:-100])
    elif damage == "changed":
        tokens.write_bytes(content[:-4] + b"\1\0\0\0")
    else:
        (entry / "split.json").write_text("{}")
    capsys.readouterr()
    assert equal(prepared(folder, cache), first)
    assert "is incomplete" in capsys.readouterr().err
    no_tokenizing(monkeypatch)
    assert equal(prepared(folder, cache), first)
    assert capsys.readouterr().err == ""


def test_unwritable_data_cache_does_not_stop_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "cache").write_text("a file")
    assert equal(prepared(folder, folder / "cache"), prepared(folder))
    assert "could not be kept" in capsys.readouterr().err


def test_missing_data_file_is_the_only_message(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="there is no data file"):
        prepared(folder, folder / "cache", train=("absent.jsonl",))
    assert capsys.readouterr().err == ""


def test_cache_key_of_a_remote_file_needs_a_checksum_or_time(tmp_path: Path) -> None:
    import fsspec

    data = DataSettings(train=(), max_length=96, packing=False)
    how = coding(tokenizer(), GEMMA4, data, None)
    (tmp_path / "a.jsonl").write_text("one\n")
    with_time = f"file://{tmp_path}/a.jsonl"
    first, _ = caching.key([with_time], data, how, tmp_path)
    (tmp_path / "a.jsonl").write_text("other\n")
    second, _ = caching.key([with_time], data, how, tmp_path)
    assert first and second and first != second
    # A store that reports only a file's size could hold other content of the same size.
    fsspec.filesystem("memory").pipe("/a.jsonl", b"one\n")
    key, reason = caching.key(["memory://a.jsonl"], data, how, tmp_path)
    assert key is None and "neither a checksum nor a time" in reason
