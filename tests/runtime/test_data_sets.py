"""Tests of the data sets that ship with the project."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from recipec.runtime.data.formats import ParsedSample
from recipec.runtime.data.sources import open_rows
from recipec.runtime.settings import DataSettings


def read_rows(folder: Path, *names: str) -> list[ParsedSample]:
    readers = open_rows(names, DataSettings(train=(), max_length=64, packing=False), folder)
    rows = [row for reader in readers for row in reader]
    assert not any(reader.malformed.count for reader in readers)
    return rows


@pytest.mark.parametrize(("name", "train", "held_out"), [("quickstart", 300, 30), ("gemma3-270m", 195, 20)])
def test_shipped_datasets_have_enough_rows_and_no_duplicates(
    root: Path, name: str, train: int, held_out: int
) -> None:
    folder = root / "recipes" / "data" / name
    rows = read_rows(folder, "train.jsonl")
    evaluation = read_rows(folder, "eval.jsonl")
    assert len(rows) >= train and len(evaluation) >= held_out
    questions = [
        json.dumps([m for m in row.messages if m["role"] != "assistant"]) for row in rows + evaluation
    ]
    assert len(set(questions)) == len(questions)  # no duplicates, and no overlap of eval and train
    assert all(m["content"].isascii() for row in rows + evaluation for m in row.messages)


def test_gemma3_270m_dataset_answers_follow_the_answer_format(root: Path) -> None:
    folder = root / "recipes" / "data" / "gemma3-270m"
    rows = read_rows(folder, "train.jsonl", "eval.jsonl")
    form = re.compile(r"ANSWER: [^|\n]+ \| CONFIDENCE: (high|medium|low)")
    seen = [form.fullmatch(row.messages[-1]["content"]) for row in rows]
    assert all(seen)
    assert {match[1] for match in seen if match} == {"high", "medium", "low"}
