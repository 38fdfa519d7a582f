"""The data sets that ship with the project."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from runtime.data.reading import read_rows
from runtime.data.report import Problems


@pytest.mark.parametrize(("name", "train", "held_out"), [("quickstart", 300, 30), ("gemma3-270m", 195, 20)])
def test_rows(root: Path, name: str, train: int, held_out: int) -> None:
    problems = Problems()
    folder = root / "recipes" / "data" / name
    rows, _ = read_rows(["train.jsonl"], {}, folder, problems)
    evaluation, _ = read_rows(["eval.jsonl"], {}, folder, problems)
    assert problems.count == 0
    assert len(rows) >= train and len(evaluation) >= held_out
    questions = [
        json.dumps([m for m in row.messages if m["role"] != "assistant"]) for row in rows + evaluation
    ]
    assert len(set(questions)) == len(questions)  # nothing twice, and nothing of eval in train
    assert all(m["content"].isascii() for row in rows + evaluation for m in row.messages)


def test_every_answer_of_the_real_model_has_the_format(root: Path) -> None:
    folder = root / "recipes" / "data" / "gemma3-270m"
    rows, _ = read_rows(["train.jsonl", "eval.jsonl"], {}, folder, Problems())
    form = re.compile(r"ANSWER: [^|\n]+ \| CONFIDENCE: (high|medium|low)")
    seen = [form.fullmatch(row.messages[-1]["content"]) for row in rows]
    assert all(seen)
    assert {match[1] for match in seen if match} == {"high", "medium", "low"}
