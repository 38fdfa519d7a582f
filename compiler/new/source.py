"""The data of a new recipe: its format by the columns of its first rows, and how long they are."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from compiler.errors import ArtifactError
from compiler.sources import ENDINGS, is_dataset
from compiler.steps import CHARACTERS_PER_TOKEN
from compiler.wording import listing
from runtime.data.formats import FIELDS

LOOKED_AT = 200
"""Rows that are read."""

MOST = 8 << 20
"""Characters of a line, or of a file that is one JSON list, that are read."""

PLACEHOLDER = "data/train.jsonl"
"""What a recipe names whose data was not given, beside the recipe."""

COLUMNS: tuple[tuple[str, dict[str, str]], ...] = (
    ("preference", {"chosen": "chosen", "rejected": "rejected"}),
    ("chat", {"messages": "messages"}),
    ("chat", {"messages": "conversations"}),
    ("chat", {"messages": "conversation"}),
    ("prompt_completion", {"prompt": "prompt", "completion": "completion"}),
    ("instruction", {"instruction": "instruction", "output": "output"}),
    ("instruction", {"instruction": "instruction", "output": "response"}),
    ("prompt_completion", {"prompt": "prompt", "completion": "response"}),
    ("prompt_completion", {"prompt": "question", "completion": "answer"}),
    ("prompt_completion", {"prompt": "query", "completion": "response"}),
    ("prompt_completion", {"prompt": "input", "completion": "output"}),
    ("text", {"text": "text"}),
    ("text", {"text": "content"}),
)
"""Formats by the columns that a row has, the most telling first: the format's names to the file's."""


@dataclass(frozen=True)
class Source:
    """Where the samples are, and what they look like.

    Attributes:
        path: as the recipe names it.
        format: of `data.format`; None where the rows cannot be looked at.
        seen: whether the format is from the rows themselves.
        fields: the format's names for columns to the file's, where they differ.
        longest: of the rows that were read, about, in tokens; None where none were.
        rows: that were read: all there are, where there are fewer than LOOKED_AT.
    """

    path: str
    format: str | None
    seen: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    longest: int | None = None
    rows: int | None = None


def look(file: Path, format: str | None) -> Source:
    """What a local file holds.

    Args:
        format: that the user says it has; None has it recognised.

    Raises:
        ArtifactError: it cannot be read, has no rows, or they are of no format.
    """
    try:
        rows = _first_rows(file)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArtifactError(
            f"{file} cannot be read: {reason}", "see what is in it, or name another"
        ) from None
    if rows is None:
        return Source(str(file), format)
    if not rows:
        raise ArtifactError(f"{file} has no rows", "put samples into it, or name another file")
    longest = max(map(_tokens, rows)) or None
    found = recognise(rows[0])
    if format is not None:
        fields = found[1] if found and found[0] == format else {}
        return Source(str(file), format, False, fields, longest, len(rows))
    if found is None:
        raise ArtifactError(
            f"{file} has the columns {listing(map(str, rows[0]))}, by which no format is recognised",
            f"say which it is with --format ({listing(FIELDS, 'or')}), and rename columns with data.fields",
        )
    return Source(str(file), found[0], True, found[1], longest, len(rows))


def recognise(row: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """The format of a row by its columns, and the columns to rename; None when it is of none."""
    for format, columns in COLUMNS:
        if all(row.get(column) is not None for column in columns.values()):
            differ = {name: column for name, column in columns.items() if name != column}
            # ShareGPT's column is read without being renamed.
            return format, {} if differ == {"messages": "conversations"} else differ
    return None


def placed(source: Source, folder: Path) -> Source:
    """The source with its path as a recipe in `folder` names it."""
    if "://" in source.path or not Path(source.path).exists():  # yet to come, beside the recipe
        return source
    relative = os.path.relpath(os.path.abspath(source.path), os.path.abspath(folder))
    return replace(source, path=Path(relative).as_posix())


def _first_rows(file: Path) -> list[dict[str, Any]] | None:
    """The first rows; None of a kind that this environment cannot read, or a data set's folder."""
    if is_dataset(file.name):
        if file.is_file():
            raise ValueError(f"its name ends in none of {listing(ENDINGS, 'or')}, which tell how it is read")
        return None
    if not file.is_file():
        raise ValueError("it is no regular file")
    name = file.name.lower()
    kind = name.removesuffix(".gz").rpartition(".")[2]
    if kind == "parquet" and find_spec("pyarrow"):
        return _parquet(file)
    if kind not in ("jsonl", "json", "csv"):
        return None
    with gzip.open(file) if name.endswith(".gz") else file.open("rb") as stream:
        text = io.TextIOWrapper(stream, encoding="utf-8", newline="")
        rows = csv.DictReader(text) if kind == "csv" else _json_rows(text, kind)
        return list(islice(rows, LOOKED_AT))


def _json_rows(text: io.TextIOWrapper, kind: str) -> Iterator[dict[str, Any]]:
    """The rows of a file with one object a line, or of one list of objects."""
    line = text.readline(MOST)
    if kind == "json" and line.lstrip().startswith("["):
        whole = line + text.read(MOST)
        if len(whole) >= MOST:
            raise ValueError("it is one JSON list of more than 8 MB: say --format, or write it as .jsonl")
        yield from (row for row in json.loads(whole) if isinstance(row, dict))
        return
    number = 1
    while line:
        if line.strip():
            yield _object(line, number)
        line, number = text.readline(MOST), number + 1


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"line {number} is no JSON object")
    return row


def _parquet(file: Path) -> list[dict[str, Any]]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        batch = next(ParquetFile(file).iter_batches(LOOKED_AT), None)
    except ArrowInvalid as error:
        raise ValueError(str(error)) from None
    return [] if batch is None else batch.to_pylist()


def _tokens(row: Mapping[str, Any]) -> int:
    return len(json.dumps(row, ensure_ascii=False, default=str)) // CHARACTERS_PER_TOKEN
