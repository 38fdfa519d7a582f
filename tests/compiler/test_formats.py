"""What the compiler says of data is what the runtime does with it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from compiler.checks import formats
from runtime.data.formats import FIELDS
from runtime.data.masking import check_loss_on
from runtime.errors import UserError
from runtime.settings import DataSettings

LOSS_ON = ("assistant", "last_assistant", "completion", "all")


def test_columns_that_can_be_renamed() -> None:
    assert {name: set(columns) for name, columns in formats.FIELDS.items()} == {
        name: set(columns) for name, columns in FIELDS.items()
    }


@pytest.mark.parametrize(
    ("format", "loss_on"), itertools.product((f for f in FIELDS if f != "preference"), LOSS_ON)
)
def test_what_can_carry_loss(format: str, loss_on: str) -> None:
    settings = DataSettings(train=("a.jsonl",), max_length=8, format=format, loss_on=loss_on)
    try:
        check_loss_on(settings)
        accepted = True
    except UserError:
        accepted = False
    assert accepted == (loss_on in formats.LOSS_ON[format])


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
def test_kinds_of_sources(path: str, known: bool, tmp_path: Path) -> None:
    (tmp_path / "there.v2").mkdir()
    assert formats.is_known(path, tmp_path) is known
