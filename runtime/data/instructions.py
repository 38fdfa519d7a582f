"""Parse rows of the format instruction: an instruction and its output, as a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .columns import column_of, only, said, unread
from .formats import ParsedSample, filled_text, tools_column, tools_of
from .messages import Messages, parted
from .values import Malformed, parsed, text_of


def parse_instruction(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse an instruction after its earlier turns; see `formats.parse_chat`."""
    instruction = filled_text(row, fields, "instruction")
    output = filled_text(row, fields, "output")
    read = {role: fields.get(role, role) for role in ("instruction", "output")} | tools_column(row, fields)

    def optional(role: str) -> str | None:
        column = column_of(role, row, fields)
        if column is None:
            return None
        read[role] = column
        return text_of(only(row[column]) if role == "reasoning" else row[column], repr(column))

    context, system = optional("input"), optional("system")
    messages: Messages = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for user, assistant in _history(row, fields, read):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    answer = {"role": "assistant", "content": output}
    if not parted({"content": output})[0] and (reasoning := optional("reasoning")) is not None:
        answer["reasoning_content"] = reasoning
    asked = instruction if context is None else f"{instruction}\n\n{context}"
    messages += [{"role": "user", "content": asked}, answer]
    return ParsedSample(
        origin,
        messages=messages,
        completion_start=len(messages) - 1,
        tools=tools_of(row, fields),
        unread=unread("instruction", row, fields, read, said(messages)),
    )


def _history(
    row: Mapping[str, Any], fields: Mapping[str, str], read: dict[str, str]
) -> list[tuple[str, str]]:
    """Parse the earlier turns of an instruction row: pairs of a user text and an assistant text."""
    name = fields.get("history", "history")
    value = row.get(name)
    if value:
        read["history"] = name
    turns = parsed(value, repr(name)) if value else []
    pairs = []
    for turn in turns if isinstance(turns, list) else [turns]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise Malformed(f"{name!r} is not a list of pairs")
        pairs.append((text_of(turn[0], repr(name)), text_of(turn[1], repr(name))))
    return pairs
