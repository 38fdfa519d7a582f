"""Parse rows of the format instruction: an instruction and its output, as a conversation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .formats import ParsedSample, filled_text, unused_of
from .messages import Messages
from .values import Malformed, parsed, text_of


def parse_instruction(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse an instruction after its earlier turns; see `formats.parse_chat`."""
    instruction = filled_text(row, fields, "instruction")
    context = _optional_text(row, fields, "input")
    output = filled_text(row, fields, "output")
    messages: Messages = []
    system = _optional_text(row, fields, "system")
    if system is not None:
        messages.append({"role": "system", "content": system})
    for user, assistant in _history(row, fields):
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    asked = instruction if context is None else f"{instruction}\n\n{context}"
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": output}]
    unused = unused_of(row, fields, "system")
    return ParsedSample(origin, messages=messages, completion_start=len(messages) - 1, unused=unused)


def _history(row: Mapping[str, Any], fields: Mapping[str, str]) -> list[tuple[str, str]]:
    """Parse the earlier turns of an instruction row: pairs of a user text and an assistant text."""
    name = fields.get("history", "history")
    value = row.get(name)
    turns = parsed(value, repr(name)) if value else []
    pairs = []
    for turn in turns if isinstance(turns, list) else [turns]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise Malformed(f"{name!r} is not a list of pairs")
        pairs.append((text_of(turn[0], repr(name)), text_of(turn[1], repr(name))))
    return pairs


def _optional_text(row: Mapping[str, Any], fields: Mapping[str, str], name: str) -> str | None:
    column = fields.get(name, name)
    if row.get(column) is None or (name not in fields and column in fields.values()):
        return None
    value = text_of(row[column], repr(column))
    return value if value.strip() else None
