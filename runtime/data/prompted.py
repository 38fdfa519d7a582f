"""Parse rows of a prompt and its completion, with or without a label that says whether that is desirable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from .columns import READS, said, unread
from .formats import ParsedSample, filled_text, required, tools_column, tools_of
from .messages import Messages, demand_assistant, parse_messages
from .values import Malformed, kind, text_of

LIKED = (
    "data.format: unpaired_preference, with train.objective: kto; or, to learn the liked answers as they "
    'are, data.transform: "liked.py:liked", where liked.py is\n'
    "def liked(row):\n"
    '    return row if str(row.pop("label")).lower() == "true" else None'
)
"""Advice if rows say whether an answer is desirable, but the recipe does not use it."""


def _prompt_completion(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    if is_labeled(row):
        raise Malformed(f"the label {row['label']} marks it as a judged answer, which KTO trains on")
    return prompted("prompt_completion", origin, row, fields)


def _unpaired(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    return replace(prompted("unpaired_preference", origin, row, fields), liked=label_of(row, fields))


def label_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> bool:
    """Return whether a row's answer is desirable. CSV gives the label as text.

    Raises:
        Malformed: it is neither true nor false.
    """
    name = fields.get("label", "label")
    value = required(row, name)
    if isinstance(value, str):
        value = {"true": True, "false": False}.get(value.strip().lower(), value)
    if not isinstance(value, bool):
        raise Malformed(f"{name!r} is {value!r}, and not true or false")
    return value


def prompted(format: str, origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Return a prompt and its completion.

    Args:
        format: prompt_completion, or unpaired_preference, which also reads a label.

    Raises:
        Malformed: one of them is missing, or one is text and the other is messages.
    """
    prompt_name, completion_name = fields.get("prompt", "prompt"), fields.get("completion", "completion")
    prompt, completion = required(row, prompt_name), required(row, completion_name)
    demand_alike(prompt, prompt_name, completion, completion_name)
    read = {role: fields.get(role, role) for role in READS[format][0]}
    if isinstance(prompt, list):
        before = conversation(prompt, prompt_name, fields)
        after = conversation(completion, completion_name, fields)
        demand_assistant(after)
        read |= tools_column(row, fields)
        rest = unread(format, row, fields, read, said(before + after))
        tools = tools_of(row, fields)
        return ParsedSample(origin, before + after, completion_start=len(before), tools=tools, unread=rest)
    completion = text_of(completion, repr(completion_name))
    prompt = filled_text(row, fields, "prompt")
    rest = unread(format, row, fields, read, (prompt, completion))
    return ParsedSample(origin, prompt=prompt, completion=completion, unread=rest)


def is_labeled(row: Mapping[str, Any]) -> bool:
    """Return whether a prompt's completion has a valid label; CSV gives it as text."""
    label = row.get("label")
    return isinstance(label, bool) or (isinstance(label, str) and label.lower() in ("true", "false"))


PARSERS = {"prompt_completion": _prompt_completion, "unpaired_preference": _unpaired}
"""The parsers of these formats."""


def demand_alike(first: Any, first_name: str, second: Any, second_name: str) -> None:
    """Refuse a row that mixes text and messages."""
    if isinstance(first, list) != isinstance(second, list):
        raise Malformed(
            f"{first_name!r} is {kind(first)} and {second_name!r} {kind(second)}: both are text, or both "
            "are lists of messages"
        )


def conversation(value: Any, name: str, fields: Mapping[str, str]) -> Messages:
    return parse_messages(value, name, fields, f"{name!r} message")
