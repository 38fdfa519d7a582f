"""Tests of streamed training data: equal batches on every mesh and after a kill, bounded memory, bad rows."""

from __future__ import annotations

import gzip
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipec.runtime.data import file_rows, stream
from recipec.runtime.data.prepare import PreparedData, Tokenizing, prepare
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source, TrainSettings
from tests.runtime.chats import tokenizer, write
from tests.runtime.preparing import conversations, same


def streamed(
    folder: Path,
    after: dict[str, Any] | None = None,
    rows: int = 4,
    batch: int = 8,
    steps: int = 12,
    **settings: Any,
) -> PreparedData:
    given = {"train": ("shards",), "packing": True, "max_length": 96, "stream_window": 20, **settings}
    train = TrainSettings(steps=steps, global_batch_size=batch, micro_batch_size=1)
    return prepare(
        DataSettings(**given), train, rows, tokenizer(), folder, tokenizing=Tokenizing(workers=0, after=after)
    )


def lines(count: int, seed: int) -> list[str]:
    return [json.dumps({"messages": chat}) for chat in conversations(count, seed)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write shards of every seekable kind: 4 x 23 rows."""
    place = tmp_path / "shards"
    place.mkdir()
    plain, packed, pressed = lines(23, 1), lines(23, 2), lines(23, 3)
    # A byte order mark and blank lines are no rows, but count as bytes and lines.
    (place / "a.jsonl").write_text("\ufeff" + "\n\n".join(plain) + "\n", encoding="utf-8")
    (place / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(packed).encode()))
    (place / "c.jsonl.zst").write_bytes(pa.compress("\n".join(pressed).encode(), codec="zstd", asbytes=True))
    columns = pa.table({"messages": conversations(23, 4)})
    pq.write_table(columns, place / "d.parquet", row_group_size=5)
    return tmp_path


def origins(run: PreparedData) -> list[str]:
    return [origin for index in range(run.total_steps * run.accumulation) for origin in run.origins(index)]


@pytest.mark.parametrize("packing", [False, True])
def test_stream_pass_has_every_row_once_in_a_new_order(
    folder: Path, packing: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Read 92 rows in windows of 23: a pass has four windows, and the next pass has another order."""
    run = streamed(folder, stream_window=23, packing=packing, batch=4, steps=60)
    drawn = origins(run)
    first, second = drawn[:92], drawn[92:184]
    assert set(Counter(first).values()) == {1} and set(first) == set(second) and first != second
    assert "all 92 rows of shards are read; pass 2 over them begins" in capsys.readouterr().err
    read_in_order = [o.rpartition("#")[0] or o.rpartition(":")[0] for o in first]
    assert len(set(read_in_order[:23])) <= 2  # one shard after the other, shuffled within a window
    whole = prepare(
        DataSettings(train=("shards",), packing=packing, max_length=96),
        TrainSettings(epochs=1, global_batch_size=4, micro_batch_size=1),
        4,
        tokenizer(),
        folder,
    )
    by_origin = {whole.samples.origin(i): s.tokens.tolist() for i, s in enumerate(whole.samples)}
    for index in range(5):
        batch, said = run.micro_batch(index), iter(run.origins(index))
        for tokens, segments in zip(batch["tokens"], batch["segment_ids"], strict=True):
            for segment in range(1, int(segments.max()) + 1):
                assert tokens[segments == segment].tolist() == by_origin[next(said)]


def test_batches_are_the_same_on_other_meshes(folder: Path) -> None:
    two, eight = streamed(folder, rows=2), streamed(folder, rows=8)
    for step in range(12):
        parts = [two.micro_batch(step * 4 + part) for part in range(4)]
        whole = eight.micro_batch(step)
        for name in ("tokens", "positions", "segment_ids", "loss_mask"):
            assert np.array_equal(np.concatenate([part[name] for part in parts]), whole[name])
        assert sum(float(part["norm"]) for part in parts) == pytest.approx(float(whole["norm"]))
        half = two.micro_batch(step * 4, [1])
        assert np.array_equal(half["tokens"], parts[0]["tokens"][1:])


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"shuffle_seed": None},
        {"stream_window": 3, "packing": False},
        {
            "stream_window": 23,
            "packing": False,
            "train": ("shards/d.parquet",),
        },  # a window ends with its file
    ],
)
def test_resumed_stream_gives_the_batches_of_an_uninterrupted_run(
    folder: Path, settings: dict[str, Any]
) -> None:
    run = streamed(folder, **settings)
    whole = list(run.batches())
    for step in (1, 5, 11):
        # As in a checkpoint.
        state = json.loads(
            json.dumps(streamed(folder, **settings).state(step) if step == 5 else run.state(step))
        )
        again = streamed(folder, state, **settings)
        assert again.state(step) == state and again.fingerprint == run.fingerprint
        rest = list(again.batches(start=step))
        assert len(rest) == (12 - step) * 2
        assert all(same(x, y) for x, y in zip(whole[step * 2 :], rest, strict=True))


def test_resumed_stream_reads_one_window_and_no_earlier_shard(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = streamed(folder, batch=4).state(9)
    assert state["window"]["number"] > 1
    opened: list[str] = []
    parsed: list[str] = []

    def noted(seen: list[str], real: Any) -> Any:
        def call(first: Any, *rest: Any) -> Any:
            # Another thread reads the next window.
            if threading.current_thread() is threading.main_thread():
                seen.append(str(first))
            return real(first, *rest)

        return call

    monkeypatch.setattr(file_rows, "read_file", noted(opened, file_rows.read_file))
    monkeypatch.setattr(file_rows, "record", noted(parsed, file_rows.record))
    streamed(folder, state, batch=4)
    # A window has rows of at most two shards, and no earlier JSON row is parsed.
    assert 1 <= len(opened) <= 2 and len(parsed) <= 20


def test_stream_state_and_fingerprint_detect_changed_data(folder: Path) -> None:
    run = streamed(folder, train=("shards/a.jsonl",))
    state = run.state(2)
    file = folder / "shards/a.jsonl"
    file.write_bytes(file.read_bytes().replace(b"quick", b"quack"))
    again = streamed(folder, state, train=("shards/a.jsonl",))
    assert again.state(2)["window_sha256"] != state["window_sha256"]
    file.write_bytes(file.read_bytes() + b"\n")
    assert streamed(folder, train=("shards/a.jsonl",)).fingerprint != run.fingerprint


def test_sources_are_drawn_by_their_weights(folder: Path) -> None:
    sources = tuple(
        Source(f"shards/{n}", weight=w) for n, w in (("a.jsonl", 6), ("b.jsonl.gz", 3), ("d.parquet", 1))
    )
    run = streamed(folder, train=sources, stream_window=200, batch=4, steps=400, packing=False)
    drawn = Counter(origin[7] for origin in origins(run))
    assert sum(drawn.values()) == 1600
    assert [drawn[name] / 1600 for name in "abd"] == pytest.approx([0.6, 0.3, 0.1], abs=0.03)
    limited = streamed(folder, train=(Source("shards/a.jsonl", limit=5),), stream_window=10, steps=3)
    assert {int(origin.rpartition(":")[2]) for origin in origins(limited)} == {1, 3, 5, 7, 9}
    in_turn = streamed(folder, train=sources[:2], stream_window=8, shuffle_seed=None, packing=False, steps=1)
    assert len({origin[7] for origin in in_turn.origins(0)}) == 2


def test_memory_does_not_grow_with_the_stream(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive, most = 0, 0
    real = stream.Window

    class Counted(real):  # type: ignore[misc, valid-type]
        def __init__(self, *given: Any, **named: Any) -> None:
            nonlocal alive, most
            super().__init__(*given, **named)
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    monkeypatch.setattr(stream, "Window", Counted)
    run = streamed(folder, steps=80)
    for _ in run.batches():
        pass
    windows = run.state(80)["window"]["number"]
    # The first window, the held ones, the one that is read ahead, and one in transfer.
    assert windows > 20 and most <= stream.HELD + 3


def test_stream_reports_bad_rows_and_stops_at_too_many(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = lines(60, 1)
    rows[0], rows[29], rows[59] = "{", '{"messages": 3}', "[]"  # the first, middle and last row of the file
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    run = streamed(
        tmp_path, train=("a.jsonl",), stream_window=20, packing=False, batch=4, shuffle_seed=None, steps=14
    )
    assert "a.jsonl:1: malformed: not JSON" in run.report.text()
    assert len(origins(run)) == 56
    said = capsys.readouterr().err
    assert "note: a.jsonl:30: malformed: 'messages' is a number" in said
    assert "note: a.jsonl:60: malformed: a list, not an object" in said
    rows[40:45] = ["broken"] * 5
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    run = streamed(
        tmp_path, train=("a.jsonl",), stream_window=20, packing=False, batch=4, shuffle_seed=None, steps=14
    )
    batches = iter(run.batches())
    for _ in range(9):  # 38 rows of two windows
        next(batches)
    with pytest.raises(
        UserError, match=r"6 of 20 rows of data.train, window 3 of the stream .*a.jsonl:41: malf"
    ):
        for _ in batches:
            pass


def test_streamed_answers_keep_whether_they_are_desirable(tmp_path: Path) -> None:
    rows = [
        {"prompt": chat[:1], "completion": chat[1:2], "label": len(chat) > 2} for chat in conversations(40)
    ]
    (tmp_path / "judged.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = {"train": ("judged.jsonl",), "packing": False, "max_length": 96, "shuffle_seed": None}
    given |= {"format": "unpaired_preference", "loss_on": "completion"}
    run = streamed(tmp_path, **given)
    train = TrainSettings(epochs=1, global_batch_size=8, micro_batch_size=1)
    whole = prepare(DataSettings(**given), train, 4, tokenizer(), tmp_path)
    assert (whole.micro_batch(0)["desirable"] > 0).any() and (whole.micro_batch(0)["desirable"] < 0).any()
    assert all(same(run.micro_batch(index), whole.micro_batch(index)) for index in range(10))


def test_window_of_which_the_transform_keeps_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(lines(40, 1)))
    (tmp_path / "few.py").write_text("taken = []\n\ndef few(row):\n    taken.append(row)\n")
    with (tmp_path / "few.py").open("a") as file:
        file.write("    return row if len(taken) <= 20 else None\n")
    settings = {"train": ("a.jsonl",), "transform": "few.py:few", "packing": False, "shuffle_seed": None}
    batches = iter(streamed(tmp_path, **settings).batches())
    with pytest.raises(UserError, match=r"window 2 .* be used: data.transform returns None for 20 of them"):
        list(batches)


def test_unusable_stream_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(UserError, match=r"empty.jsonl is empty"):
        streamed(tmp_path, train=("empty.jsonl",))
    (tmp_path / "text.jsonl").write_text('{"text": "a"}\n' * 30)
    with pytest.raises(UserError, match=r"none of the 20 rows of text.jsonl is of") as found:
        streamed(tmp_path, train=("text.jsonl",))
    assert found.value.help == "data.format: text"
    (tmp_path / "set").mkdir()
    write(tmp_path / "set/train.jsonl", conversations(3))
    with pytest.raises(UserError, match=r"a part of a split needs"):
        streamed(tmp_path, train=(Source("set", split="train[:2]"),))
