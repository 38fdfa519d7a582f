"""The samples that rows are parsed into, and the format chat.

chat               messages (or ShareGPT's conversations); optional tools
instruction        instruction, output; optional input, system, history
prompt_completion  prompt and completion, both text or both messages; optional tools
text               text
preference         chosen and rejected, both text or both messages; optional prompt, tools
unpaired_preference  prompt and completion as in prompt_completion, and label: whether that is desirable
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from .messages import Messages, demand_assistant, parse_messages, parse_tools
from .values import Malformed, text_of

if TYPE_CHECKING:
    from .preferences import PreferenceRow

BESIDE = ("system", "tools", "images", "image", "videos", "audios", "documents", "chat_template_kwargs")
"""Columns that are part of a sample in other tools' formats; a note reports those that are not read."""


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
        unused: columns that hold a part of the sample but are not read.
    """

    origin: str
    messages: Messages | None = None
    completion_start: int | None = None
    prompt: str | None = None
    completion: str | None = None
    tools: list[dict[str, Any]] | None = None
    unused: tuple[str, ...] = ()
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
    system = row.get("system") if sharegpt else None
    if isinstance(system, str) and system.strip() and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": text_of(system, "'system'")})
    demand_assistant(messages)
    read = ["tools"]
    if row.get("system") == messages[0]["content"]:
        read.append("system")
    return ParsedSample(
        origin, messages=messages, tools=tools_of(row, fields), unused=unused_of(row, fields, *read)
    )


def tools_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> list[dict[str, Any]] | None:
    name = fields.get("tools", "tools")
    return parse_tools(row.get(name), name)


def unused_of(row: Mapping[str, Any], fields: Mapping[str, str], *read: str) -> tuple[str, ...]:
    """Return nonempty columns of BESIDE that are neither read nor named in data.fields."""
    beside = (name for name in BESIDE if name not in read and name not in fields.values())
    return tuple(name for name in beside if row.get(name) not in (None, "", [], {}, "[]", "{}"))


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
