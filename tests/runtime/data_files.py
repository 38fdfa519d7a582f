"""The same 50 conversations in every kind of file and data set."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.runtime.chats import chat

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "the sky"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}


def conversations() -> list[dict[str, Any]]:
    """Return 50 rows; some have a system turn, some tools and calls, some text beyond ASCII."""
    rows: list[dict[str, Any]] = []
    for i in range(50):
        system = "Be brief." if i % 3 == 0 else None
        messages = chat(f"Question {i}, “ü” 🎈\nand more", f"Answer, {i}", system=system)
        if i % 5 == 0:
            asked = {"role": "assistant", "content": None, "tool_calls": [CALL]}
            messages[-1:-1] = [asked, {"role": "tool", "content": "blue", "tool_call_id": "c1"}]
        rows.append({"messages": messages, "tools": [TOOL] if i % 5 == 0 else None})
    return rows


def expected() -> list[tuple[list[dict[str, Any]], Any]]:
    out = []
    for row in conversations():
        for message in row["messages"]:
            message["content"] = message["content"] or ""
        out.append((row["messages"], row["tools"]))
    return out


def json_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_jsonl(path: Path) -> None:
    path.write_bytes(json_lines(conversations()))


def write_list(path: Path) -> None:
    path.write_text(json.dumps(conversations(), indent=1), "utf-8")


def write_gzip(path: Path) -> None:
    path.write_bytes(gzip.compress(json_lines(conversations())))


def write_zstd(path: Path) -> None:
    content = json_lines(conversations())
    codec = pa.Codec("zstd")
    # Two frames, as parallel compressors write.
    path.write_bytes(
        b"".join(codec.compress(part, asbytes=True) for part in (content[:3000], content[3000:]))
    )


def write_csv(path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["messages", "tools"])
        for row in conversations():
            writer.writerow([json.dumps(row["messages"]), json.dumps(row["tools"]) if row["tools"] else ""])


def write_parquet(path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(conversations()), path, row_group_size=7)


def write_arrow_file(path: Path) -> None:
    table = pa.Table.from_pylist(conversations())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_arrow_stream(path: Path) -> None:
    table = pa.Table.from_pylist(conversations())
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def write_json_column(path: Path) -> None:
    """Write Parquet with tool calls and tools in `datasets`' type for arbitrary JSON."""
    from datasets import Dataset, Features, Json, List, Value

    message = {"role": Value("string"), "content": Value("string"), "tool_calls": List(Json())}
    features = Features(
        {"messages": List(message | {"tool_call_id": Value("string")}), "tools": List(Json())}
    )
    rows = conversations()
    for row in rows:
        for one in row["messages"]:
            one.setdefault("tool_calls", None)
            one.setdefault("tool_call_id", None)
    Dataset.from_list(rows, features=features).to_parquet(path)


def write_records(path: Path) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in conversations():
        writer.write(json.dumps(row).encode())
    writer.close()


def write_saved(path: Path) -> None:
    from datasets import Dataset

    Dataset.from_list(conversations()).save_to_disk(path)


def write_saved_splits(path: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = conversations()
    parts = {"train": Dataset.from_list(rows), "test": Dataset.from_list(rows[:3])}
    DatasetDict(parts).save_to_disk(path)


def write_folder(path: Path) -> None:
    """Write Parquet files with the hub's names."""
    (path / "data").mkdir(parents=True)
    (path / "README.md").write_text("About it.")
    table = pa.Table.from_pylist(conversations())
    pq.write_table(table.slice(0, 30), path / "data" / "train-00000-of-00002.parquet")
    pq.write_table(table.slice(30), path / "data" / "train-00001-of-00002.parquet")
    pq.write_table(table.slice(0, 3), path / "data" / "test-00000-of-00001.parquet")


KINDS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "json lines": ("a.jsonl", write_jsonl, "a.jsonl:50"),
    "json list": ("a.json", write_list, "a.json:"),
    "gzip": ("a.jsonl.gz", write_gzip, "a.jsonl.gz:50"),
    "zstd": ("a.jsonl.zst", write_zstd, "a.jsonl.zst:50"),
    "csv": ("a.csv", write_csv, "a.csv:51"),
    "parquet": ("a.parquet", write_parquet, "a.parquet#49"),
    "parquet with json": ("a.parquet", write_json_column, "a.parquet#49"),
    "arrow file": ("a.arrow", write_arrow_file, "a.arrow#49"),
    "arrow stream": ("a.arrow", write_arrow_stream, "a.arrow#49"),
    "array_record": ("a.array_record", write_records, "a.array_record#49"),
    "shard": ("a-train.array_record-00000-of-00001", write_records, "a-train.array_record-00000-of-00001#49"),
    "saved": ("saved", write_saved, "saved#49"),
    "saved splits": ("saved", write_saved_splits, "saved[train]#49"),
    "folder": ("folder", write_folder, "folder/data/train-00001-of-00002.parquet#19"),
}
