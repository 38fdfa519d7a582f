"""Tests of reading sources: every kind of file and data set gives the same rows, and clear errors."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipec.runtime.data.formats import ParsedSample
from recipec.runtime.data.sources import Reader, open_rows
from recipec.runtime.errors import UserError
from recipec.runtime.settings import DataSettings, Source
from tests.runtime.chats import chat
from tests.runtime.data_files import (
    KINDS,
    conversations,
    expected,
    json_lines,
    write_arrow_stream,
    write_folder,
    write_gzip,
    write_jsonl,
    write_list,
    write_parquet,
    write_records,
    write_saved_splits,
    write_zstd,
)


def reader(source: str | Source, folder: Path, **settings: Any) -> Reader:
    return open_rows(
        [source], DataSettings(**{"train": (), "max_length": 64, "packing": False, **settings}), folder
    )[0]


def error_of(source: str | Source, folder: Path, **settings: Any) -> UserError:
    with pytest.raises(UserError) as error:
        list(reader(source, folder, **settings))
    return error.value


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    name, write, last = KINDS[kind]
    write(tmp_path / name)
    source = reader(name, tmp_path)
    rows = list(source)
    assert [(row.messages, row.tools) for row in rows] == expected()
    assert rows[-1].origin.startswith(last)
    assert len({row.origin for row in rows}) == 50
    assert (source.read, source.malformed.count, source.removed) == (50, 0, 0)
    # A second reading counts again.
    assert len(list(source)) == source.read == 50


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst", "a.json", "a.arrow", "a.array_record"])
def test_remote_addresses_are_read_like_local_files(tmp_path: Path, name: str) -> None:
    import fsspec

    write = {file: write for file, write, _ in KINDS.values()}[name]
    write(tmp_path / name)
    prefix = "memory://data/"
    with fsspec.open(prefix + name, "wb") as file:
        file.write((tmp_path / name).read_bytes())
    rows = list(reader(prefix + name, Path("/nowhere")))
    assert [(row.messages, row.tools) for row in rows] == expected()
    assert rows[0].origin.startswith(prefix + name)


def test_folder_at_a_remote_address_is_read(tmp_path: Path) -> None:
    import fsspec

    write_folder(tmp_path / "folder")
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "folder"), "/bucket/folder", recursive=True)
    rows = list(reader("memory://bucket/folder", tmp_path))
    assert [(row.messages, row.tools) for row in rows] == expected()
    assert rows[-1].origin == "memory://bucket/folder/data/train-00001-of-00002.parquet#19"


@pytest.mark.parametrize("write", [write_saved_splits, write_folder])
@pytest.mark.parametrize(
    ("split", "which"),
    [
        (None, range(50)),
        ("test", range(3)),
        ("train[:10%]", range(5)),
        ("train[28:33]", range(28, 33)),
        ("test+train[90%:]", [0, 1, 2, *range(45, 50)]),
    ],
)
def test_split_expressions_read_the_rows_that_they_name(
    tmp_path: Path, write: Callable[[Path], None], split: str | None, which: Any
) -> None:
    write(tmp_path / "set")
    rows = list(reader(Source("set", split=split), tmp_path))
    whole = expected()
    assert [row.messages for row in rows] == [whole[i][0] for i in which]


def test_origins_of_a_split_slice_use_row_numbers_of_the_whole_split(tmp_path: Path) -> None:
    write_saved_splits(tmp_path / "set")
    rows = list(reader(Source("set", split="train[28:30]"), tmp_path))
    assert [row.origin for row in rows] == ["set[train]#28", "set[train]#29"]


@pytest.mark.parametrize("write", [write_saved_splits, write_folder])
@pytest.mark.parametrize("split", ["validation", "train[:"])
def test_missing_split_error_lists_available_splits(
    tmp_path: Path, write: Callable[[Path], None], split: str
) -> None:
    write(tmp_path / "set")
    error = error_of(Source("set", split=split), tmp_path)
    assert f"set has no split '{split}'" in error.message
    assert error.help is not None and "train" in error.help and "test" in error.help


def test_multi_line_csv_rows_keep_their_line_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(
        b'\xef\xbb\xbfprompt,completion\r\n"a\r\n""b"", c",12\r\n\r\nd,NA\r\n,e\r\nf\r\ng,\xff\r\n'
    )
    source = reader("a.csv", tmp_path, format="prompt_completion")
    rows = list(source)
    assert [(row.origin, row.prompt, row.completion) for row in rows] == [
        ("a.csv:2", 'a\r\n"b", c', "12"),
        ("a.csv:5", "d", "NA"),
    ]
    assert [(p.origin, p.reason) for p in source.malformed.first] == [
        ("a.csv:6", "'prompt' is blank"),
        ("a.csv:7", "1 cells, and the header names 2"),
        ("a.csv:8", "'completion' is not UTF-8"),
    ]


def test_malformed_jsonl_rows_are_counted_and_named(tmp_path: Path) -> None:
    good = json.dumps({"messages": chat("Hello", "Hi")})
    lines = ["\ufeff" + good, "", "nonsense", good, good, '{"messages": 3}', good + "\r", "[1]", good]
    (tmp_path / "a.jsonl").write_bytes("\n".join(lines).encode() + b"\n\xff{}\n" + b"[" * 100_000)
    source = reader("a.jsonl", tmp_path)
    assert [row.origin for row in source] == [f"a.jsonl:{n}" for n in (1, 4, 5, 7, 9)]
    assert (source.read, source.malformed.count) == (10, 5)
    assert [(p.origin, p.reason) for p in source.malformed.first] == [
        ("a.jsonl:3", "not JSON (Expecting value, column 1)"),
        ("a.jsonl:6", "'messages' is a number, not a list"),
        ("a.jsonl:8", "a list, not an object"),
        ("a.jsonl:10", "not UTF-8 (invalid start byte at byte 0)"),
        ("a.jsonl:11", "not JSON that can be read: nested too deep, or a number too long"),
    ]


def test_json_list_rows_are_read_lazily(tmp_path: Path) -> None:
    """Read no further than the requested rows, so that a preview of a large file is fast."""
    (tmp_path / "a.json").write_text('[{"text": "a"}, {"text": "b"}, nonsense')
    rows = iter(reader("a.json", tmp_path, format="text"))
    assert [next(rows).completion, next(rows).completion] == ["a", "b"]
    with pytest.raises(UserError, match=r"a.json:1: not JSON \(Expecting value, column 32\)"):
        next(rows)


@pytest.mark.parametrize(
    ("format", "columns", "help"),
    [
        ("prompt_completion", ("question", "answer"), "data.fields: {prompt: question, completion: answer}"),
        ("chat", ("instruction", "output"), "data.format: instruction"),
        (
            "chat",
            ("question", "answer"),
            "data.format: instruction, and data.fields: {instruction: question, output: answer}",
        ),
        (
            "prompt_completion",
            ("a", "b"),
            "it has 'a', 'b': say with data.fields which column is which, as in "
            "{prompt: COLUMN, completion: COLUMN}",
        ),
    ],
)
def test_error_for_other_columns_suggests_format_or_fields(
    tmp_path: Path, format: str, columns: tuple[str, ...], help: str
) -> None:
    pq.write_table(pa.table({name: ["x", "y"] for name in columns}), tmp_path / "a.parquet")
    error = error_of("a.parquet", tmp_path, format=format)
    assert error.message.startswith(
        f"none of the 2 rows of a.parquet is of the format {format}: the first, a.parquet#0"
    )
    assert "no '" in error.message and all(repr(name) in error.message for name in columns)
    assert error.help == help


def test_missing_renamed_column_is_named_in_the_error(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    error = error_of("a.jsonl", tmp_path, fields={"messages": "dialog"})
    assert "no 'dialog' (it has 'messages', 'tools')" in error.message
    assert error.help == "remove data.fields: the columns have the format's own names"


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.array_record"])
def test_empty_file_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    error = error_of(name, tmp_path)
    assert error.message == f"{name} is empty" and error.help


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\n\n"),
        ("a.json", b" [ ] "),
        ("a.csv", b"messages\n"),
        pytest.param("a.jsonl.gz", gzip.compress(b"", mtime=0), id="a.jsonl.gz"),
    ],
)
def test_file_without_rows_is_named_in_the_error(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert error_of(name, tmp_path).message == f"{name} is empty"


BROKEN = {
    "parquet": ("a.parquet", write_parquet, 0.7),
    "arrow stream": ("a.arrow", write_arrow_stream, 0.7),
    "array_record": ("a.array_record", write_records, 0.7),
    "gzip": ("a.jsonl.gz", write_gzip, 0.7),
    "zstd": ("a.jsonl.zst", write_zstd, 0.7),
    "json list": ("a.json", write_list, 0.7),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_truncated_file_is_named_in_the_error(tmp_path: Path, kind: str) -> None:
    name, write, share = BROKEN[kind]
    write(tmp_path / name)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: int(len(content) * share)])
    error = error_of(name, tmp_path)
    assert error.message.startswith(name) and error.help
    assert "\n" not in error.message


@pytest.mark.parametrize("name", ["a.parquet", "a.array_record", "a.jsonl.zst"])
def test_file_with_the_wrong_extension_is_named_in_the_error(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(json_lines(conversations()))
    error = error_of(name, tmp_path)
    assert error.message.startswith(name) and error.help


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'a,b\n1,"2\n3,4\n', "a.csv:2: not CSV (unexpected end of data)"),
        (b'a,b\n"1"2,3\n', "a.csv:2: not CSV (',' expected after '\"')"),
        (b"a,a\n1,2\n", "a.csv has two columns 'a'"),
    ],
)
def test_invalid_csv_is_refused_with_the_reason(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    assert error_of("a.csv", tmp_path).message == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[\n{"a": 1},\n{"b" 2}]', "a.json:3: not JSON (Expecting ':' delimiter, column 6)"),
        (b'[{"a": 1}\n{"b": 2}]', "a.json:2: not JSON (expected ',' or ']', column 1)"),
        (b'[{"a": 1},\n', "a.json:2: not JSON (Expecting value, column 1)"),
        (b'[{"a": 1}', "a.json:1: not JSON (it ends within the list, column 10)"),
        (b'[{"a": 1}]\n[]', "a.json:2: not JSON (there is more after the list, column 1)"),
        (b"[" * 100_000, "a.json:1: not JSON (nested too deep, column 2)"),
        (b' {\r\n"data": []}', "a.json holds an object that is written over several lines"),
        (b'["\xff"]', "a.json cannot be read: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_invalid_json_list_is_refused_with_its_position(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    assert message in error_of("a.json", tmp_path).message


@pytest.mark.parametrize(
    ("source", "message", "help"),
    [
        ("none.jsonl", "there is no data file", "--data-dir"),
        ("memory://none.jsonl", "there is no data file memory://none.jsonl", "--data-dir"),
        ("nonsense://x.jsonl", "Protocol not known: nonsense", None),
        ("gs://bucket/x.jsonl", "gs://bucket/x.jsonl cannot be opened", "pip install gcsfs"),
        ("notes.txt", "the ending of notes.txt does not show its format", ".jsonl, .json or .csv"),
        ("empty", "the folder empty holds no data set", "save_to_disk"),
        (Source("a.jsonl", split="train"), "a.jsonl is not a data set of the Hugging Face hub", "hf://"),
        ("broken", "broken cannot be read: KeyError", "save_to_disk"),
        ("hf://a/b/c", "hf://a/b/c is not the address of a data set", "hf://OWNER/NAME@REVISION"),
        (Source("empty", config="c"), "Hugging Face hub, and has no config 'c'", "hf://"),
    ],
)
def test_unreadable_source_is_refused_with_message_and_help(
    no_buckets: None, tmp_path: Path, source: str | Source, message: str, help: str | None
) -> None:
    write_jsonl(tmp_path / "a.jsonl")
    (tmp_path / "notes.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "README.md").write_text("x")
    (tmp_path / "broken").mkdir()
    for file in ("state.json", "dataset_info.json"):
        (tmp_path / "broken" / file).write_text("{}")
    error = error_of(source, tmp_path)
    assert message in error.message
    assert help is None or (error.help is not None and help in error.help)


class Closed:
    """A file system that answers with an exception, as a bucket without permission does."""

    protocol = "closed"
    error: Exception

    def isdir(self, path: str) -> bool:
        raise self.error


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("Forbidden: https://storage.googleapis.com/storage/v1/b/bucket/o"),
        RuntimeError("Your default credentials were not found."),
        OSError("Anonymous caller does not have storage.objects.get access, 401"),
    ],
)
def test_bucket_permission_error_suggests_gcloud_login(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception
) -> None:
    monkeypatch.setattr(Closed, "error", error, raising=False)
    monkeypatch.setattr("fsspec.core.url_to_fs", lambda path: (Closed(), path))
    found = error_of("gs://bucket/x.jsonl", tmp_path)
    assert found.message == f"gs://bucket/x.jsonl cannot be opened: {error}"
    assert found.help is not None and "gcloud auth application-default login" in found.help


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


def with_nulls() -> list[dict[str, Any]]:
    """Return two conversations whose calls have different arguments, one of them null, once as JSON text."""

    def row(name: str, arguments: Any, at: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        tool = {
            "type": "function",
            "function": {"name": name, "parameters": {"type": "object", "properties": at}},
        }
        asked = {"role": "assistant", "content": None, "tool_calls": [call]}
        return {"messages": [*chat("Look"), asked], "tools": [tool]}

    return [
        row("look", {"at": "sky", "by": None}, {"at": {"type": "string", "default": None}}),
        row("wait", {"seconds": 2}, {"seconds": {"type": "number"}}),
    ]


def called(source: str, folder: Path, **settings: Any) -> list[tuple[Any, Any]]:
    """Return the arguments and the parameters' properties of each row."""
    rows = list(reader(source, folder, **settings))
    return [
        (
            row.messages[-1]["tool_calls"][0]["function"]["arguments"],
            row.tools[0]["function"]["parameters"]["properties"],
        )
        for row in rows
    ]


def test_nulls_of_json_stay_and_fillers_of_column_formats_go(tmp_path: Path) -> None:
    import datasets

    rows = with_nulls()
    kept = [
        ({"at": "sky", "by": None}, {"at": {"type": "string", "default": None}}),
        ({"seconds": 2}, {"seconds": {"type": "number"}}),
    ]
    (tmp_path / "a.jsonl").write_bytes(json_lines(rows))
    assert called("a.jsonl", tmp_path) == kept
    # Columns of objects: Arrow gives each object the keys of all.
    table = pa.Table.from_pylist(rows)
    assert table.to_pylist()[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["at"] is None
    pq.write_table(table, tmp_path / "b.parquet")
    filled = [({"at": "sky"}, {"at": {"type": "string"}}), kept[1]]
    assert called("b.parquet", tmp_path) == filled
    # JSON text in a column, and the type Json of datasets, have no fillers.
    texts = [{name: json.dumps(value) for name, value in row.items()} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "c.parquet")
    assert called("c.parquet", tmp_path) == kept
    features = datasets.Features({name: datasets.List(datasets.Json()) for name in ("messages", "tools")})
    datasets.Dataset.from_list(rows, features=features).save_to_disk(str(tmp_path / "saved"))
    assert called("saved", tmp_path) == kept


def test_transform_gets_the_nulls_of_a_column_format(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(with_nulls()), tmp_path / "a.parquet")
    (tmp_path / "keep.py").write_text(
        "def keep(row):\n"
        "    arguments = row['messages'][1]['tool_calls'][0]['function']['arguments']\n"
        "    return row if arguments['seconds'] is None else None\n"
    )
    assert [arguments for arguments, _ in called("a.parquet", tmp_path, transform="keep.py:keep")] == [
        {"at": "sky"}
    ]
