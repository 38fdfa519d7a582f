"""Reading chat rows: what is accepted, what is left out and how it is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.data.reading import Malformed, parse_line, read_rows
from runtime.data.report import Problems
from runtime.errors import UserError
from tests.runtime.chats import chat, write

GOOD = json.dumps({"messages": chat("Hello", "Hi")})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "not JSON"),
        (b"\xff{}", "not UTF-8"),
        (b"[" * 100_000, "nested too deep"),
        (b"[1]", "a list, not an object"),
        (b'{"text": "x"}', "no 'messages' (it has 'text')"),
        (b"{}", "no 'messages' (it has nothing)"),
        (b'{"messages": "x"}', "'messages' is a string, not a list"),
        (b'{"messages": []}', "'messages' is empty"),
        (b'{"messages": ["x"]}', "message 0 is a string"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "the role 'robot'"),
        (b'{"messages": [{"role": ["user"], "content": "x"}]}', "the role ['user']"),
        (b'{"messages": [{"content": "x"}]}', "the role None"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "text"}]}]}',
            "a list as content, not a string",
        ),
        (b'{"messages": [{"role": "user"}]}', "a null as content"),
        (b'{"messages": [{"role": "user", "content": "x"}]}', "no assistant turn"),
        (b'{"messages": [{"role": "assistant", "content": " "}]}', "message 0 (assistant) is blank"),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "half a surrogate pair"),
        (b'{"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}', "calls tools"),
    ],
)
def test_malformed(line: bytes, reason: str) -> None:
    with pytest.raises(Malformed) as error:
        parse_line(line, {})
    assert reason in str(error.value)
    assert len(str(error.value)) < 200


def test_renamed_columns() -> None:
    turns = [{"from": "user", "value": "a"}, {"from": "assistant", "value": "b", "name": "n"}]
    line = json.dumps({"conversations": turns}).encode()
    messages = parse_line(line, {"messages": "conversations", "role": "from", "content": "value"})
    assert messages == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "name": "n"},
    ]


def test_offenders_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    lines = ["\ufeff" + GOOD, "", "nonsense", GOOD, GOOD, '{"messages": 3}', GOOD + "\r", GOOD]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), "utf-8")
    problems = Problems()
    rows, total = read_rows(["a.jsonl"], {}, tmp_path, problems)
    assert (len(rows), total) == (5, 7)
    assert [row.origin for row in rows] == [f"a.jsonl:{n}" for n in (1, 4, 5, 7, 8)]
    assert problems.count == 2
    assert [p.origin for p in problems.first] == ["a.jsonl:3", "a.jsonl:6"]


def test_mostly_malformed(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([GOOD, "x", "y"]))
    with pytest.raises(
        UserError, match=r"a.jsonl: 2 of 3 rows are malformed; the first is a.jsonl:2: not JSON"
    ):
        read_rows(["a.jsonl"], {}, tmp_path, Problems())


@pytest.mark.parametrize("content", [b"", b"\n\n"])
def test_empty_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"a.jsonl is empty") as error:
        read_rows(["a.jsonl"], {}, tmp_path, Problems())
    assert error.value.help


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("none.jsonl", "there is no data file"),
        (".", "is a folder"),
        ("memory://none.jsonl", "there is no data file"),
        ("nonsense://x.jsonl", "cannot be read"),
    ],
)
def test_unreadable(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_rows([path], {}, tmp_path, Problems())


def test_unknown_rename(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="renames 'prompt'"):
        read_rows(["a.jsonl"], {"prompt": "x"}, tmp_path, Problems())


def test_addresses_are_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec

    write(tmp_path / "a.jsonl", [chat("Hello", "Hi")])
    with fsspec.open("memory://data/a.jsonl", "wb") as file:
        file.write((tmp_path / "a.jsonl").read_bytes())
    rows, total = read_rows(["memory://data/a.jsonl"], {}, tmp_path, Problems())
    assert total == 1 and rows[0].messages == chat("Hello", "Hi")
