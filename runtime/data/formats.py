"""The samples that rows are parsed into, and the format chat.

chat               messages (or ShareGPT's conversations); optional system, reasoning, tools
instruction        instruction, output; optional input, system, history, reasoning, tools
prompt_completion  prompt and completion, both text or both messages; optional tools
text               text
preference         chosen and rejected, both text or both messages; optional prompt, system, tools
unpaired_preference  prompt and completion as in prompt_completion, and label: whether that is desirable
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .columns import NOTHING, Unread, column_of, only, said, unread
from .messages import Messages, demand_assistant, parse_messages, parse_tools, parted
from .values import Malformed, text_of

if TYPE_CHECKING:
    from .preferences import PreferenceRow


@dataclass(frozen=True)
class ParsedSample:
    """One sample: a conversation, or plain text.

    Attributes:
        origin: its place: FILE:LINE; FILE#ROW (from 0) for column formats; hf://ID[SPLIT]#ROW.
        messages: dicts with "role" (one of messages.ROLES), "content" (text; "" with tool calls) and
            any other keys of the source, which the chat template may use. No value in them is None. None
            for plain text.
        completion_start: index of the first message of the completion: the output of an instruction, the
            first message of a conversational completion. None for chat rows.
        prompt, completion: plain text, for prompt_completion; for text the completion alone. The completion
            may be blank.
        tools: JSON schemas for the chat template, or None.
        liked: whether the completion is desirable, None if rows do not say.
        unread: the columns that are not read.
    """

    origin: str
    messages: Messages | None = None
    completion_start: int | None = None
    prompt: str | None = None
    completion: str | None = None
    tools: list[dict[str, Any]] | None = None
    unread: Unread = NOTHING
    liked: bool | None = None


AnyRow: TypeAlias = "ParsedSample | PreferenceRow"


def parse_chat(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse a conversation.

    Args:
        row: columns by their names in the source.
        fields: name used here -> name in the source.

    Raises:
        Malformed: the row does not match the format.
    """
    name = fields.get("messages", "messages")
    sharegpt = (
        "messages" not in fields and row.get("messages") is None and row.get("conversations") is not None
    )
    if sharegpt:
        name = "conversations"
    messages = parse_messages(required(row, name), name, fields)
    read = {"messages": name, **tools_column(row, fields)}
    system = column_of("system", row, fields) if sharegpt or "system" in fields else None
    if system is not None and isinstance(row[system], str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(row[system], repr(system))})
        read["system"] = system
    answers = [message for message in messages if message["role"] == "assistant"]
    thoughts = column_of("reasoning", row, fields)
    if thoughts is not None and thoughts.lower() == "rationale" and "reasoning" not in fields:
        thoughts = None  # next to messages it may be a judge's
    if thoughts is not None and len(answers) == 1 and not parted(answers[0])[0]:
        answers[0]["reasoning_content"] = text_of(only(row[thoughts]), repr(thoughts))
        read["reasoning"] = thoughts
    demand_assistant(messages)
    rest = unread("chat", row, fields, read, said(messages))
    return ParsedSample(origin, messages=messages, tools=tools_of(row, fields), unread=rest)


def tools_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> list[dict[str, Any]] | None:
    name = fields.get("tools", "tools")
    return parse_tools(row.get(name), name)


def tools_column(row: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, str]:
    """Return the column of the tools by its role; {} if the row has none."""
    name = fields.get("tools", "tools")
    return {"tools": name} if name in row else {}


def required(row: Mapping[str, Any], name: str) -> Any:
    value = row.get(name)
    if value is None:
        if name in row:
            raise Malformed(f"{name!r} is null")
        raise Malformed(f"no {name!r} (it has {', '.join(map(repr, sorted(row, key=str))) or 'nothing'})")
    return value


def filled_text(row: Mapping[str, Any], fields: Mapping[str, str], name: str) -> str:
    column = fields.get(name, name)
    value = text_of(required(row, column), repr(column))
    if not value.strip():
        raise Malformed(f"{column!r} is blank")
    return value
