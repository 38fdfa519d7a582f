"""Examine the data of a new recipe: its format, by the columns of its first rows, and the rows' length."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from recipec.compiler.errors import ArtifactError
from recipec.compiler.lowering.first_rows import first_rows
from recipec.compiler.lowering.formats import FIELDS
from recipec.compiler.lowering.run_length import CHARACTERS_PER_TOKEN
from recipec.compiler.wording import listing
from recipec.runtime.data.prompted import LIKED, is_labeled

PLACEHOLDER = "data/train.jsonl"
"""The path that a recipe names if no data was given, relative to the recipe."""

COLUMNS: tuple[tuple[str, dict[str, str]], ...] = (
    ("preference", {"chosen": "chosen", "rejected": "rejected"}),
    ("unpaired_preference", {"prompt": "prompt", "completion": "completion", "label": "label"}),
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
"""Formats by a row's columns, the most specific first: the format's column names to the file's."""


@dataclass(frozen=True)
class NewData:
    """Where the samples are, and what is known about them.

    Attributes:
        path: as the recipe names it.
        format: value of `data.format`; None if the rows cannot be read, or match no format.
        seen: whether the format was found from the rows themselves.
        turns: whether a row's prompt is a list of messages.
        fields: the format's names for columns to the file's, where they differ.
        longest: estimated tokens of the longest row that was read; None if none was read.
        rows: number of rows that were read: all rows, if the file has fewer than LOOKED_AT.
        columns: columns of the first row, if they match no format.
    """

    path: str
    format: str | None
    seen: bool = False
    turns: bool = False
    fields: Mapping[str, str] = field(default_factory=dict)
    longest: int | None = None
    rows: int | None = None
    columns: tuple[str, ...] = ()

    def refused(self) -> ArtifactError:
        """Return the error for columns that match no format."""
        return ArtifactError(
            f"{self.path} has the columns {listing(self.columns)}, by which no format is recognized",
            f"say which it is with --format ({listing(FIELDS, 'or')}), and rename columns with data.fields",
        )

    def told(self, format: str, column: Callable[[str], str]) -> NewData:
        """Return the source with a format that the user chose.

        Args:
            column: asks which column of the file holds a given column of the format.
        """
        needed = next(names for known, names in COLUMNS if known == format) if self.columns else {}
        asked = {name: column(name) for name in needed}
        return replace(
            self, format=format, fields={name: given for name, given in asked.items() if given != name}
        )


def look(file: Path, format: str | None) -> NewData:
    """Examine a local file.

    Args:
        format: the format that the user chose; None to recognize it.

    Raises:
        ArtifactError: when the file cannot be read, or has no rows.
    """
    try:
        rows = first_rows(file)
    except (OSError, EOFError, ValueError, RecursionError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ArtifactError(
            f"{file} cannot be read: {reason}", "check its content, or name another file"
        ) from None
    if rows is None:
        return NewData(str(file), format)
    if not rows:
        raise ArtifactError(f"{file} has no rows", "put samples into it, or name another file")
    longest = max(map(_tokens, rows)) or None
    if format == "prompt_completion" and any(map(_is_labeled, rows)):
        raise ArtifactError(f"{file} has prompts, completions and a label: for objective: kto", LIKED)
    found = recognize(rows[0])
    if format is not None:
        fields = found[1] if found and found[0] == format else {}
        return NewData(str(file), format, fields=fields, longest=longest, rows=len(rows))
    if found is None:
        return NewData(str(file), None, longest=longest, rows=len(rows), columns=tuple(map(str, rows[0])))
    turns = isinstance(rows[0].get(found[1].get("prompt", "prompt")), list)
    return NewData(str(file), found[0], True, turns, found[1], longest, len(rows))


def recognize(row: Mapping[str, Any]) -> tuple[str, dict[str, str]] | None:
    """Return the format of a row by its columns, and the columns to rename; None if none matches."""
    for format, columns in COLUMNS:
        if all(row.get(column) is not None for column in columns.values()):
            differ = {name: column for name, column in columns.items() if name != column}
            # ShareGPT's column name is read without renaming.
            return format, {} if differ == {"messages": "conversations"} else differ
    return None


def _is_labeled(row: Mapping[str, Any]) -> bool:
    found = recognize(row)
    return found is not None and found[0] == "prompt_completion" and is_labeled(row)


def as_turns(source: NewData) -> NewData:
    """Adapt the source to a model tuned for chat. If its columns are questions and answers under other names
    than prompt and completion, questions become user turns, and answers assistant turns."""
    if not source.seen or source.format != "prompt_completion" or not source.fields or source.turns:
        return source
    names = {"prompt": "instruction", "completion": "output"}
    columns = {"prompt": "prompt", "completion": "completion", **source.fields}
    return replace(
        source,
        format="instruction",
        fields={names[name]: column for name, column in columns.items() if names[name] != column},
    )


def placed(source: NewData, folder: Path) -> NewData:
    """Return the source with its path as a recipe in `folder` names it."""
    if "://" in source.path or not Path(source.path).exists():  # still to be created next to the recipe
        return source
    relative = os.path.relpath(os.path.abspath(source.path), os.path.abspath(folder))
    return replace(source, path=Path(relative).as_posix())


def _tokens(row: Mapping[str, Any]) -> int:
    return len(json.dumps(row, ensure_ascii=False, default=str)) // CHARACTERS_PER_TOKEN
