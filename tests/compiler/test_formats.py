"""Tests that the compiler's facts about data formats match the runtime."""

from __future__ import annotations

from pathlib import Path

import pytest

from recipec.compiler.checks import formats


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("data/a.JSONL", True),
        ("gs://b/a.json.gz", True),
        ("a.csv.zst", True),
        ("a.parquet.gz", False),
        ("a.array_record-00000-of-00010", True),
        ("hf://gsm8k", True),
        ("hf://owner/name@v1.0", True),
        ("hf://", False),
        ("folder", True),
        ("folder.v2", False),
        ("there.v2", True),
        ("a.txt", False),
    ],
)
def test_data_formats_are_recognized_by_path(path: str, known: bool, tmp_path: Path) -> None:
    (tmp_path / "there.v2").mkdir()
    assert formats.is_known(path, tmp_path) is known
