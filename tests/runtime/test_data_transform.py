"""Tests of data.transform: the user's function, and errors in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipec.runtime.data.sources import Reader, open_rows
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings

FILE = '''"""Questions and answers, without the empty ones."""

from __future__ import annotations

import dataclasses
import json


@dataclasses.dataclass
class Turn:
    role: str
    content: str


def clean(row):
    if not row["a"]:
        return None
    turns = [Turn("user", row["q"]), Turn("assistant", row["a"].strip())]
    return {"messages": [dataclasses.asdict(turn) for turn in turns]}


def count(row):
    return len(row)


def half(row):
    return row if int(row["q"]) % 2 else json.loads(row["a"])


NOT_A_FUNCTION = 3
'''
ROWS = [{"q": "1", "a": " one"}, {"q": "2", "a": ""}, {"q": "3", "a": "three"}]


def reader(
    folder: Path, transform: str, rows: Any = ROWS, file: str | None = FILE, **settings: Any
) -> Reader:
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    if file is not None:
        (folder / "prepare.py").write_text(file, "utf-8")
    return open_rows(
        ["a.jsonl"],
        DataSettings(train=(), max_length=64, packing=False, transform=transform, **settings),
        folder,
    )[0]


def error_of(folder: Path, transform: str, **given: Any) -> UserError:
    with pytest.raises(UserError) as error:
        list(reader(folder, transform, **given))
    return error.value


def test_transform_runs_before_the_format_is_read(tmp_path: Path) -> None:
    source = reader(tmp_path, "prepare.py:clean")
    rows = [(row.origin, [message["content"] for message in row.messages]) for row in source]
    assert rows == [("a.jsonl:1", ["1", "one"]), ("a.jsonl:3", ["3", "three"])]
    assert (source.read, source.removed, source.malformed.count) == (3, 1, 0)
    assert not (tmp_path / "__pycache__").exists()


def test_changed_transform_file_is_read_again(tmp_path: Path) -> None:
    assert len(list(reader(tmp_path, "prepare.py:clean"))) == 2
    changed = FILE.replace('if not row["a"]', 'if row["q"]!="3"')
    assert len(list(reader(tmp_path, "prepare.py:clean", file=changed))) == 1


def test_transform_exception_names_the_row_and_the_line(tmp_path: Path) -> None:
    error = error_of(tmp_path, "prepare.py:clean", rows=[*ROWS, {"q": "4"}])
    assert error.message == "prepare.py:16: data.transform fails on a.jsonl:4: KeyError: 'a'"
    assert error.help == "correct prepare.py:clean; None leaves a row out"


def test_exception_in_a_called_library_names_the_transform_line(tmp_path: Path) -> None:
    error = error_of(tmp_path, "prepare.py:half")
    assert error.message.startswith(
        "prepare.py:27: data.transform fails on a.jsonl:2: JSONDecodeError: Expecting"
    )


def test_transform_result_that_is_not_a_row_is_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, "prepare.py:count")
    assert error.message == "prepare.py:count returns a number for a.jsonl:1"
    assert error.help == "data.transform returns a row (a dict) or None"


def test_transform_that_removes_every_row_is_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, "prepare.py:clean", rows=[ROWS[1]] * 4)
    assert error.message == "prepare.py:clean returns None for each of the 4 rows of a.jsonl"


def test_transform_result_of_another_format_is_refused(tmp_path: Path) -> None:
    error = error_of(tmp_path, "prepare.py:clean", format="text")
    assert (
        "none of the 3 rows of a.jsonl (1 removed by data.transform) is of the format text" in error.message
    )
    assert "a.jsonl:1: no 'text' (it has 'messages')" in error.message
    assert error.help == "data.format: chat"


@pytest.mark.parametrize(
    ("transform", "file", "message", "help"),
    [
        ("prepare.py:clean", None, "there is no file", "next to train.py"),
        ("prepare.py", FILE, "data.transform names 'prepare.py'", "FILE.py:FUNCTION"),
        ("prepare.py:claen", FILE, "prepare.py has no function 'claen'", "did you mean clean?"),
        (
            "prepare.py:NOT_A_FUNCTION",
            FILE,
            "has no function 'NOT_A_FUNCTION'",
            "it has Turn, clean, count, half",
        ),
        ("prepare.py:f", "x = 1", "has no function 'f'", "it has no functions"),
        ("prepare.py:f", "def f(row)\n    pass", "prepare.py:1 is not Python: expected ':'", "correct"),
        (
            "prepare.py:f",
            "\n1 / 0",
            "prepare.py:2: the file of data.transform cannot be imported: ZeroDivisionError",
            "correct",
        ),
        (
            "prepare.py:f",
            "import sys\nsys.exit(0)",
            "prepare.py:2: the file of data.transform cannot be",
            "correct",
        ),
        (
            "prepare.py:f",
            "import no_such_module",
            "ModuleNotFoundError: No module named 'no_such_module'",
            "must not need other files",
        ),
        ("prepare.py:f", "\0", "prepare.py", "correct"),
    ],
)
def test_transform_that_cannot_be_loaded_is_refused_with_the_reason(
    tmp_path: Path, transform: str, file: str | None, message: str, help: str
) -> None:
    error = error_of(tmp_path, transform, file=file)
    assert message in error.message
    assert error.help is not None and help in error.help
