"""JSON-lines files of chat rows: {"messages": [{"role": ..., "content": ...}, ...]}."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime.data.report import Problems
from runtime.errors import UserError

ROLES = ("system", "user", "assistant")
NAMES = ("messages", "role", "content")
"""What `data.fields` can rename."""

SHOWN = 120
"""Characters of a reason that are kept."""


@dataclass(frozen=True)
class Row:
    """One conversation.

    Attributes:
        origin: where it stands, as FILE:LINE.
        messages: dicts with "role" (one of ROLES), "content" (text) and whatever else the source
            gave, which the chat template may use.
    """

    origin: str
    messages: list[dict[str, Any]]


class Malformed(ValueError):
    """Why a line is not a conversation that can be trained on."""


def read_rows(
    paths: Sequence[str], fields: Mapping[str, str], data_dir: Path, problems: Problems
) -> tuple[list[Row], int]:
    """The well-formed rows of some files in order, and how many lines there were.

    Args:
        paths: local files, relative ones from `data_dir`, or addresses such as gs://bucket/file.jsonl.
        fields: renames: the name used here ("messages", "role", "content") -> the name in the files.
        problems: is told of each malformed row.

    Raises:
        UserError: a file is missing, unreadable or empty, more than half of its rows are malformed, or
            `fields` renames what is not there.
    """
    unknown = [name for name in fields if name not in NAMES]
    if unknown:
        raise UserError(
            f"data.fields renames {unknown[0]!r}, which chat data does not have",
            f"its keys are {', '.join(NAMES)}; the values are the names in your files, "
            "as in fields: {messages: conversations}",
        )
    rows: list[Row] = []
    total = 0
    for path in paths:
        malformed = Problems()
        lines = 0
        for number, line in enumerate(_lines(path, data_dir), 1):
            if not line.strip():
                continue
            lines += 1
            origin = f"{path}:{number}"
            try:
                rows.append(Row(origin, parse_line(line, fields)))
            except Malformed as error:
                malformed.add(origin, str(error))
        if not lines:
            raise UserError(f"{path} is empty", 'it needs one JSON object a line: {"messages": [...]}')
        if malformed.count * 2 > lines:
            raise UserError(
                f"{path}: {malformed.count} of {lines} rows are malformed; the first is "
                f"{malformed.first[0].origin}: {malformed.first[0].reason}",
                'each line is {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", '
                '"content": "..."}]}; data.fields renames columns',
            )
        problems.merge(malformed)
        total += lines
    return rows, total


def parse_line(line: bytes, fields: Mapping[str, str]) -> list[dict[str, Any]]:
    """The messages of a line.

    Raises:
        Malformed: it is not a chat row.
    """
    try:
        # json.loads itself accepts UTF-16 and lone surrogates; neither is wanted in a .jsonl file.
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise Malformed(f"not UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise Malformed(f"not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise Malformed("not JSON that can be read: nested too deep") from error
    if not isinstance(row, dict):
        raise Malformed(f"a {_kind(row)}, not an object")
    column = fields.get("messages", "messages")
    messages = row.get(column)
    if messages is None:
        raise Malformed(f"no {column!r} (it has {', '.join(map(repr, sorted(row))) or 'nothing'})"[:SHOWN])
    if not isinstance(messages, list):
        raise Malformed(f"{column!r} is a {_kind(messages)}, not a list")
    if not messages:
        raise Malformed(f"{column!r} is empty")
    parsed = [_message(message, i, fields) for i, message in enumerate(messages)]
    if not any(message["role"] == "assistant" for message in parsed):
        raise Malformed("no assistant turn")
    return parsed


def _message(message: Any, index: int, fields: Mapping[str, str]) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Malformed(f"message {index} is a {_kind(message)}, not an object")
    role_name, content_name = fields.get("role", "role"), fields.get("content", "content")
    role, content = message.get(role_name), message.get(content_name)
    if not isinstance(role, str) or role not in ROLES:
        raise Malformed(f"message {index} has the role {role!r}, not one of {', '.join(ROLES)}"[:SHOWN])
    if message.get("tool_calls"):
        raise Malformed(f"message {index} calls tools, which are not trained on in this version")
    if not isinstance(content, str):
        raise Malformed(f"message {index} ({role}) has a {_kind(content)} as content, not a string")
    if role == "assistant" and not content.strip():
        raise Malformed(f"message {index} (assistant) is blank")
    try:
        content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Malformed(f"message {index} ({role}) holds half a surrogate pair") from error
    rest = {key: value for key, value in message.items() if key not in (role_name, content_name)}
    return {"role": role, "content": content, **rest}


def _lines(path: str, data_dir: Path) -> Iterator[bytes]:
    """The lines of a file, without a byte-order mark."""
    try:
        if "://" in path:
            import fsspec

            stream = fsspec.open(path, "rb")
        else:
            stream = (data_dir / Path(path).expanduser()).open("rb")
        with stream as file:
            for number, line in enumerate(file):
                yield line.removeprefix(b"\xef\xbb\xbf") if number == 0 else line
    except FileNotFoundError as error:
        where = path if "://" in path else str(data_dir / path)
        raise UserError(
            f"there is no data file {where}",
            "data.train and data.eval are relative to the artifact's folder, or to --data-dir",
        ) from error
    except IsADirectoryError as error:
        raise UserError(f"{path} is a folder, not a .jsonl file", "name each file in data.train") from error
    except ImportError as error:
        raise UserError(f"{path} cannot be opened: {error}", "pip install gcsfs, for gs:// files") from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _kind(value: Any) -> str:
    names = {dict: "object", list: "list", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
