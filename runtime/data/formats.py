"""Parse rows of a source into samples, for each `data.format`.

chat               messages (or ShareGPT's conversations); optional tools
instruction        instruction, output; optional input, system, history
prompt_completion  prompt and completion, both text or both messages; optional tools
text               text
preference         chosen and rejected, both text or both messages; optional prompt, tools
unpaired_preference  prompt and completion as in prompt_completion, and label: whether that is desirable
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import UserError
from .messages import ROLES, Messages, demand_assistant, parse_messages, parse_tools
from .values import Malformed, kind, parsed, text_of

if TYPE_CHECKING:
    from .preferences import PreferenceRow

FIELDS = {
    "chat": ("messages", "tools", "role", "content", "weight"),
    "instruction": ("instruction", "input", "output", "system", "history"),
    "prompt_completion": ("prompt", "completion", "tools", "role", "content", "weight"),
    "text": ("text",),
    "preference": ("prompt", "chosen", "rejected", "tools", "role", "content", "weight"),
    "unpaired_preference": ("prompt", "completion", "label", "tools", "role", "content", "weight"),
}
"""What `data.fields` can rename in each format: columns, and the keys of a message."""

LOSS_ON = {
    "chat": ("assistant", "last_assistant", "all"),
    "instruction": ("completion", "assistant", "last_assistant", "all"),
    "prompt_completion": ("completion", "all"),
    "text": ("all",),
    "preference": ("completion",),
    "unpaired_preference": ("completion",),
}
"""Which tokens can carry loss, by `data.format`.

assistant: what every assistant turn writes; last_assistant: what the last one writes; completion:
everything after the prompt, where a prompt of messages ends in the template's generation prompt; all:
every token that another stands before.
"""

ALONE = ("preference", "unpaired_preference")
"""Formats whose answers are judged as a whole: they are not mixed with other formats, and not packed."""


def may_carry(format: str, loss_on: str | Sequence[str]) -> bool:
    """Return whether a `data.loss_on` is valid in a format: roles are valid for chats."""
    if isinstance(loss_on, str):
        return loss_on in LOSS_ON[format]
    return format == "chat" and bool(loss_on) and set(loss_on) <= set(ROLES)


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


def check_fields(format: str, fields: Mapping[str, str]) -> None:
    """Refuse renames of columns that a format does not have.

    Raises:
        UserError: `fields` has a name that is not a column of the format.
    """
    known = FIELDS.get(format)
    if known is None:
        raise UserError(f"data.format is {format!r}", f"it is one of {', '.join(FIELDS)}")
    for name in fields:
        if name not in known:
            raise UserError(
                f"data.fields renames {name!r}, which data of the format {format} does not have",
                f"its keys are {', '.join(known)}; the values are the names in your files, as in fields: "
                f"{{{known[0]}: my_column}}",
            )


def parse_row(format: str, origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse a row of any format except preference.

    Args:
        row: columns by their names in the source.
        fields: name used here -> name in the source.

    Raises:
        Malformed: the row does not match the format.
    """
    return _PARSERS[format](origin, row, fields)


def _chat(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
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


def _instruction(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
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


def _prompt_completion(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    if is_labeled(row):
        raise Malformed(f"the label {row['label']} marks it as a judged answer, which KTO trains on")
    return prompted(origin, row, fields)


def _unpaired(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    return replace(prompted(origin, row, fields), liked=label_of(row, fields))


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


def prompted(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Return a prompt and its completion.

    Raises:
        Malformed: one of them is missing, or one is text and the other is messages.
    """
    prompt_name, completion_name = fields.get("prompt", "prompt"), fields.get("completion", "completion")
    prompt, completion = required(row, prompt_name), required(row, completion_name)
    demand_alike(prompt, prompt_name, completion, completion_name)
    if isinstance(prompt, list):
        before = conversation(prompt, prompt_name, fields)
        after = conversation(completion, completion_name, fields)
        demand_assistant(after)
        tools, unused = tools_of(row, fields), unused_of(row, fields, "tools")
        return ParsedSample(origin, before + after, completion_start=len(before), tools=tools, unused=unused)
    completion = text_of(completion, repr(completion_name))
    prompt, unused = filled_text(row, fields, "prompt"), unused_of(row, fields)
    return ParsedSample(origin, prompt=prompt, completion=completion, unused=unused)


def is_labeled(row: Mapping[str, Any]) -> bool:
    """Return whether a prompt's completion has a valid label; CSV gives it as text."""
    label = row.get("label")
    return isinstance(label, bool) or (isinstance(label, str) and label.lower() in ("true", "false"))


def _plain(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    name = fields.get("text", "text")
    return ParsedSample(origin, completion=text_of(required(row, name), repr(name)))


_PARSERS = {
    "chat": _chat,
    "instruction": _instruction,
    "prompt_completion": _prompt_completion,
    "text": _plain,
    "unpaired_preference": _unpaired,
}


def demand_alike(first: Any, first_name: str, second: Any, second_name: str) -> None:
    """Refuse a row that mixes text and messages."""
    if isinstance(first, list) != isinstance(second, list):
        raise Malformed(
            f"{first_name!r} is {kind(first)} and {second_name!r} {kind(second)}: both are text, or both "
            "are lists of messages"
        )


def conversation(value: Any, name: str, fields: Mapping[str, str]) -> Messages:
    return parse_messages(value, name, fields, f"{name!r} message")


def tools_of(row: Mapping[str, Any], fields: Mapping[str, str]) -> list[dict[str, Any]] | None:
    name = fields.get("tools", "tools")
    return parse_tools(row.get(name), name)


def unused_of(row: Mapping[str, Any], fields: Mapping[str, str], *read: str) -> tuple[str, ...]:
    """Return nonempty columns of BESIDE that are neither read nor named in data.fields."""
    beside = (name for name in BESIDE if name not in read and name not in fields.values())
    return tuple(name for name in beside if row.get(name) not in (None, "", [], {}, "[]", "{}"))


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


def _optional_text(row: Mapping[str, Any], fields: Mapping[str, str], name: str) -> str | None:
    column = fields.get(name, name)
    if row.get(column) is None or (name not in fields and column in fields.values()):
        return None
    value = text_of(row[column], repr(column))
    return value if value.strip() else None
