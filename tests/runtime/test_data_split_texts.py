"""Tests of texts that are split into samples (data.overlong: split): exact tokens, targets, counts, order."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipec.runtime.data.encoding import Encoder, coding, show
from recipec.runtime.data.formats import ParsedSample
from recipec.runtime.data.prepare import PreparedData
from recipec.runtime.settings import DataSettings, Source
from tests.runtime.chats import tokenizer, write
from tests.runtime.preparing import pieces, prepared

BOS, EOS = 2, 1


def texts(folder: Path, *written: str) -> str:
    lines = (json.dumps({"text": text}) + "\n" for text in written)
    (folder / "book.jsonl").write_text("".join(lines))
    return "book.jsonl"


def book(folder: Path, *words: int) -> str:
    """Write texts of so many words, of one token each; with <bos> and <eos> they have two tokens more."""
    return texts(folder, *(" the" + " fox" * (count - 1) for count in words))


def split(folder: Path, name: str, **settings: Any) -> PreparedData:
    given = {"format": "text", "loss_on": "all", "overlong": "split", "max_length": 8, "rows": 1, "batch": 1}
    return prepared(folder, **{**given, "train": (name,), "epochs": 1, **settings})


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return found


def test_text_becomes_samples_of_max_length_tokens(tmp_path: Path) -> None:
    run = split(tmp_path, book(tmp_path, 18, 3))
    fox, the = ids(" fox"), ids(" the")
    assert len(fox) == len(the) == 1
    # <bos> is only at the beginning of the text, <eos> only at its end.
    assert [sample.tokens.tolist() for sample in run.samples] == [
        [BOS, *the, *fox * 6],
        fox * 8,
        [*fox * 3, EOS],
        [BOS, *the, *fox * 2, EOS],
    ]
    # Nothing predicts the first token of a sample, so each piece has one target less than tokens.
    assert [sample.targets.tolist() for sample in run.samples] == [
        [False] + [True] * (length - 1) for length in (8, 8, 4, 5)
    ]
    assert [run.samples.origin(number) for number in range(4)] == [
        "book.jsonl:1 piece 1 of 3",
        "book.jsonl:1 piece 2 of 3",
        "book.jsonl:1 piece 3 of 3",
        "book.jsonl:2",
    ]
    report = run.report.train
    assert (report.read, report.kept, report.split, report.pieces, report.samples) == (2, 2, 1, 3, 4)
    assert (report.tokens, report.targets, report.longest, report.truncated) == (25, 21, 8, 0)
    assert report.mean_length == 25 / 4
    assert "2 of 2 samples kept, 1 of them split into 3; 25 tokens, of which 21 are targets" in (
        report.sentence("train")
    )


@pytest.mark.parametrize(("words", "lengths", "lone"), [(14, [8, 8], 0), (15, [8, 8], 1), (6, [8], 0)])
def test_last_token_alone_is_left_out_and_said(
    tmp_path: Path, words: int, lengths: list[int], lone: int
) -> None:
    run = split(tmp_path, book(tmp_path, words))
    assert run.samples.lengths.tolist() == lengths
    assert run.report.train.lone_ends == lone
    assert ("1 split texts: the last token is left out" in run.report.text()) == bool(lone)


@pytest.mark.parametrize("packing", [False, True])
def test_each_piece_is_a_sample_of_its_own_in_an_epoch(tmp_path: Path, packing: bool) -> None:
    run = split(tmp_path, book(tmp_path, 18, 3, 40), packing=packing, rows=2, batch=4, epochs=2)
    every = sorted(tuple(sample.tokens.tolist()) for sample in run.samples)
    epoch = run.steps_per_epoch * run.accumulation
    for first in (0, epoch):
        batches = [run.micro_batch(number) for number in range(first, first + epoch)]
        assert sorted(piece for batch in batches for piece in pieces(batch)) == every
        for batch in batches:
            starts = np.diff(batch["segment_ids"], prepend=0, axis=1) > 0
            assert not batch["loss_mask"][starts].any()
            assert (batch["positions"][starts] == 0).all()
        assert sum(int(batch["loss_mask"].sum()) for batch in batches) == run.report.train.targets


def test_pieces_are_those_without_a_cache_or_other_processes(tmp_path: Path) -> None:
    from recipec.runtime.data.prepare import Tokenizing, prepare
    from recipec.runtime.settings import TrainSettings

    name = book(tmp_path, 200, 3, 90)
    plain = split(tmp_path, name, packing=True)
    data = DataSettings(
        train=(name,), format="text", loss_on="all", overlong="split", max_length=8, packing=True
    )
    train = TrainSettings(epochs=1, global_batch_size=1, micro_batch_size=1)
    for workers in (2, None):  # the second reads what the first has kept
        again = prepare(data, train, 1, tokenizer(), tmp_path, None, Tokenizing(tmp_path / "cache", workers))
        assert again.fingerprint == plain.fingerprint
        assert again.report.train.to_dict() == plain.report.train.to_dict()
    longer = prepare(
        DataSettings(**{**vars(data), "overlong": "truncate"}),
        *(train, 1, tokenizer(), tmp_path, None, Tokenizing(tmp_path / "cache")),
    )
    assert len(longer.samples) == 3  # not the kept pieces


def test_held_out_texts_keep_all_their_pieces_together(tmp_path: Path) -> None:
    name = texts(tmp_path, *(f"{i}" + " fox" * 40 for i in range(10)))
    run = split(tmp_path, name, eval_fraction=0.3)
    places = [run.samples.origin(number).partition(" ")[0] for number in range(len(run.samples))]
    assert len(set(places)) == 7 and run.report.eval is not None
    assert (run.report.eval.kept, run.report.eval.samples) == (3, 3 * places.count(places[0]))


def test_weight_draws_pieces(tmp_path: Path) -> None:
    name = book(tmp_path, 318)  # 320 tokens: 40 pieces
    run = split(tmp_path, name, train=(Source(name, weight=0.25),), packing=False)
    assert run.report.train.samples == 40 and run.steps_per_epoch == 10


def test_only_the_source_of_texts_is_split(tmp_path: Path) -> None:
    from tests.runtime.chats import chat

    words = book(tmp_path, 40)
    chats = write(tmp_path / "chats.jsonl", [chat("hello", "the fox"), chat("hello", "the fox " * 90)])
    text = Source(words, format="text", loss_on="all", overlong="split")
    run = prepared(tmp_path, train=(text, chats), max_length=32, rows=1, batch=1, epochs=1, overlong="drop")
    assert run.samples.sources.tolist() == [0, 0, 1]
    assert run.report.train.overlong.count == 1


def test_stream_has_the_pieces_of_its_windows(tmp_path: Path) -> None:
    name = texts(tmp_path, *(f"{i}" + " fox" * 40 for i in range(6)))
    whole = split(tmp_path, name, packing=False)
    streamed = split(
        tmp_path,
        name,
        packing=False,
        stream_window=2,
        shuffle_seed=None,
        epochs=None,
        steps=len(whole.samples),
    )
    seen = [piece for number in range(len(whole.samples)) for piece in pieces(streamed.micro_batch(number))]
    assert seen == [tuple(sample.tokens.tolist()) for sample in whole.samples]


def test_preview_shows_each_piece(tmp_path: Path) -> None:
    data = DataSettings(train=(), max_length=8, format="text", loss_on="all", overlong="split", packing=False)
    encoder = Encoder(coding(tokenizer(), None, data, None))
    text = " the" + " fox" * 8 + "🎉"
    shown = show(encoder, ParsedSample("x:1", completion=text))
    assert [sample.origin for sample in shown] == ["x:1 piece 1 of 2", "x:1 piece 2 of 2"]
    assert shown[0].pieces == [("<bos>", False), (" the fox fox fox fox fox fox", True)]
    assert shown[1].pieces == [(" fox", False), (" fox🎉<eos>", True)]
    assert [sample.truncated for sample in shown] == [False, False]
