"""Parse the rows of each format into samples.

chat               messages (or ShareGPT's conversations); optional system, reasoning, tools
instruction        instruction, output; optional input, system, history, reasoning, tools
prompt_completion  prompt and completion, both text or both messages; optional tools
text               text
preference         chosen and rejected, both text or both messages; optional prompt, system, tools
unpaired_preference  prompt and completion as in prompt_completion, and label: whether that is desirable
prompt             messages, or prompt as text or messages; optional tools; rewards read the other columns
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from .columns import NAMES, NOTHING, PARTS, READS, VAGUE, Unread, column_of, only, texts_of, unread
from .messages import Messages, demand_assistant, parse_messages, parse_tools, parted
from .pictures import Picture
from .row_values import Malformed, kind, parsed, text_of


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
        prompt, completion: plain text, for prompt_completion; for text the completion alone, for prompt the
            prompt alone. The completion may be blank.
        tools: JSON schemas for the chat template, or None.
        liked: whether the completion is desirable, None if rows do not say.
        unread: the columns that are not read.
        images: the pictures, in the order of the marks in the messages (`picture_rows.MARK`), each with its
            name in the row.
        columns: of a prompt: a JSON object with the row's prompt and all that rewards read (`columns_of`);
            else None.
    """

    origin: str
    messages: Messages | None = None
    completion_start: int | None = None
    prompt: str | None = None
    completion: str | None = None
    tools: list[dict[str, Any]] | None = None
    unread: Unread = NOTHING
    liked: bool | None = None
    columns: str | None = None
    images: tuple[tuple[str, Picture], ...] = ()


@dataclass(frozen=True)
class PreferencePair:
    """Two continuations of one prompt; the first is preferred.

    Attributes:
        origin: as in ParsedSample.
        prompt, chosen, rejected: all text, or all messages as in ParsedSample. `chosen` and `rejected` do not
            repeat the prompt.
        tools, unread: as in ParsedSample.
    """

    origin: str
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: list[dict[str, Any]] | None = None
    unread: Unread = NOTHING

    def answers(self) -> tuple[ParsedSample, ParsedSample]:
        """Return the chosen and the rejected answer, each as a prompt with its completion."""

        def sample(answer: Any) -> ParsedSample:
            if isinstance(self.prompt, str):
                return ParsedSample(self.origin, prompt=self.prompt, completion=answer, unread=self.unread)
            start = len(self.prompt)
            return ParsedSample(
                self.origin,
                [*self.prompt, *answer],
                completion_start=start,
                tools=self.tools,
                unread=self.unread,
            )

        return sample(self.chosen), sample(self.rejected)


AnySample: TypeAlias = "ParsedSample | PreferencePair"


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
    rest = unread("chat", row, fields, read, texts_of(messages))
    return ParsedSample(origin, messages=messages, tools=tools_of(row, fields), unread=rest)


def parse_instruction(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse an instruction after its earlier turns; see `parse_chat`."""
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
        unread=unread("instruction", row, fields, read, texts_of(messages)),
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


def parse_text(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse plain text; see `parse_chat`."""
    name = fields.get("text", "text")
    text = text_of(required(row, name), repr(name))
    return ParsedSample(origin, completion=text, unread=unread("text", row, fields, {"text": name}, (text,)))


def parse_prompt_completion(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse a prompt and its completion, which no label may judge; see `parse_chat`."""
    if is_labeled(row):
        raise Malformed(f"the label {row['label']} marks it as a judged answer, which KTO trains on")
    return prompted("prompt_completion", origin, row, fields)


def parse_unpaired_preference(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse a prompt and its completion with a label; see `parse_chat`."""
    return replace(prompted("unpaired_preference", origin, row, fields), liked=label_of(row, fields))


def parse_prompt(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> ParsedSample:
    """Parse a prompt without a completion; see `parse_chat`. Rewards read its other columns."""
    name = prompt_column(row, fields)
    value = required(row, name)
    if isinstance(value, str) and not value.lstrip().startswith("["):
        text = filled_text(row, {"prompt": name}, "prompt")
        return ParsedSample(origin, prompt=text, columns=columns_of(text, name, row, fields))
    messages = conversation(value, name, fields)
    if messages and messages[-1].get("role") == "assistant":
        raise Malformed(f"{name!r} {ENDS_WITH_ANSWER}")
    return ParsedSample(
        origin,
        messages,
        completion_start=len(messages),
        tools=tools_of(row, fields),
        columns=columns_of(messages, name, row, fields),
    )


ENDS_WITH_ANSWER = "ends with an answer of the assistant, which the model would read before its own"
"""The reason if a prompt is a whole conversation."""

PROMPT, COLUMNS = "prompt", "columns"
"""Keys of `columns_of`."""


def columns_of(prompt: Any, name: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Return a JSON object with a row's prompt, and its other columns by the names that rewards use.

    Dates and other values without a form in JSON become text.

    Args:
        prompt: a text, or messages.
        name: the column of the prompt.
    """
    names = {source: role for role, source in fields.items()}
    left = {
        str(names.get(column, column)): value for column, value in row.items() if column not in (name, None)
    }
    return json.dumps({PROMPT: prompt, COLUMNS: left}, ensure_ascii=False, default=str)


def prompt_column(row: Mapping[str, Any], fields: Mapping[str, str]) -> str:
    """Return the column of a prompt: that which `fields` names, or else "messages", or "prompt" in a row
    without them."""
    messages, prompt = (fields.get(role, role) for role in ("messages", "prompt"))
    named = "prompt" in fields and "messages" not in fields
    return messages if row.get(messages) is not None and not named else prompt


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
        rest = unread(format, row, fields, read, texts_of(before + after))
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


ANSWER = re.compile(
    r"(?:^|\n)[ \t]*(?:assistant|chatbot|model|gpt|bot|ai)[ \t]*:"
    r"|<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n+|<\|assistant\|>\n?"
    r"|<start_of_turn>model\n|<\|turn>model\n|<｜Assistant｜>|\[/INST\]"
    r"|###[ \t]*(?:assistant|response)[ \t]*:\n*",
    re.IGNORECASE,
)
"""The beginning of an assistant's turn in a conversation that is written as one text, as in HH-RLHF."""


def parse_preference(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> PreferencePair:
    """Parse a row of the format preference.

    If the prompt is missing, both answers must be whole conversations: messages, or text in which turns are
    marked. Then the prompt is what both have in common, up to the beginning of the assistant's turn in which
    they differ. The same applies if the prompt is text while the conversations contain it. Texts with a
    column for a system message are turns of a conversation.

    Raises:
        Malformed: the row does not match the format, or both answers are the same.
    """
    names = {name: fields.get(name, name) for name in ("prompt", "chosen", "rejected")}
    chosen, rejected = required(row, names["chosen"]), required(row, names["rejected"])
    demand_alike(chosen, names["chosen"], rejected, names["rejected"])
    if chosen == rejected:
        raise Malformed(f"{names['chosen']!r} and {names['rejected']!r} are the same")
    question = row.get(names["prompt"]) or None  # CSV has no nulls
    if not isinstance(chosen, list):
        good, bad = filled_text(row, fields, "chosen"), filled_text(row, fields, "rejected")
        if question is not None:
            asked = filled_text(row, fields, "prompt")
            if "system" in fields or any(PARTS.get(str(name).lower()) == "system" for name in row):
                return _of_turns(origin, row, fields, (asked, good, bad))
            rest = _unread(row, fields, ("prompt",), (asked, good, bad))
            return PreferencePair(origin, asked, good, bad, unread=rest)
        start = _last_turn(good, bad)
        if start is None:
            raise Malformed(_without_prompt(row, names["prompt"]))
        rest = _unread(row, fields, (), (good, bad))
        return PreferencePair(origin, good[:start], good[start:], bad[start:], unread=rest)

    liked = conversation(chosen, names["chosen"], fields)
    disliked = conversation(rejected, names["rejected"], fields)
    if isinstance(question, list):
        prompt = conversation(question, names["prompt"], fields)
        if liked[: len(prompt)] == prompt == disliked[: len(prompt)]:
            liked, disliked = liked[len(prompt) :], disliked[len(prompt) :]
    else:
        start = _common(liked, disliked)
        prompt, liked, disliked = liked[:start], liked[start:], disliked[start:]
        if not any(message["role"] == "user" for message in prompt):
            about = f"{names['prompt']!r} is not a list of messages" if question else "no 'prompt'"
            raise Malformed(f"{about}, and chosen and rejected do not begin with the same question")
    for messages, name in ((liked, names["chosen"]), (disliked, names["rejected"])):
        if not any(message["role"] == "assistant" for message in messages):
            raise Malformed(f"no assistant turn in {name!r} after the prompt")
    read = ("prompt", "tools") if isinstance(question, list) else ("tools",)
    rest = _unread(row, fields, read, texts_of([*prompt, *liked, *disliked]))
    return PreferencePair(origin, prompt, liked, disliked, tools_of(row, fields), rest)


def _of_turns(
    origin: str, row: Mapping[str, Any], fields: Mapping[str, str], texts: tuple[str, str, str]
) -> PreferencePair:
    """Return a pair of texts with a system message, which may be blank, as conversations."""
    prompt, good, bad = texts
    messages: Messages = [{"role": "user", "content": prompt}]
    system = column_of("system", row, fields)
    if system is not None:
        messages.insert(0, {"role": "system", "content": text_of(row[system], repr(system))})
    liked, disliked = ([{"role": "assistant", "content": answer}] for answer in (good, bad))
    rest = _unread(row, fields, ("prompt", "tools"), (*texts, *texts_of(messages)), system)
    return PreferencePair(origin, messages, liked, disliked, tools_of(row, fields), rest)


def _unread(
    row: Mapping[str, Any],
    fields: Mapping[str, str],
    more: tuple[str, ...],
    texts: Iterable[str],
    system: str | None = None,
) -> Unread:
    read = {role: fields.get(role, role) for role in ("chosen", "rejected", *more)}
    return unread("preference", row, fields, read | ({"system": system} if system else {}), texts)


def _without_prompt(row: Mapping[str, Any], name: str) -> str:
    """Return the reason for a pair of texts without a prompt."""
    if name in row:
        return f"{name!r} is blank, and chosen and rejected are not whole conversations"
    others = [name for name in row if str(name).lower() in NAMES["prompt"] and name not in VAGUE]
    hint = f": it may be {others[0]!r}" if others else ""
    return f"no {name!r}{hint}; chosen and rejected are not whole conversations"


def _common(chosen: Messages, rejected: Messages) -> int:
    """Return the number of messages with which both begin; each keeps at least one of its own."""
    shorter = min(len(chosen), len(rejected))
    return next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter - 1)


def _last_turn(chosen: str, rejected: str) -> int | None:
    """Return where the last turn of both begins, if they are conversations that begin alike."""
    start = None
    for turn in ANSWER.finditer(_beginning(chosen, rejected)):
        if chosen[: turn.start()].strip():
            start = turn.end()
    return start


def _beginning(first: str, second: str) -> str:
    """Return the characters with which both texts begin."""
    shorter = min(len(first), len(second))
    return first[: next((i for i in range(shorter) if first[i] != second[i]), shorter)]


Parser: TypeAlias = Callable[[str, Mapping[str, Any], Mapping[str, str]], AnySample]
"""(a row's origin, its columns by their names in the source, name used here -> name in the source) -> the
sample. Raises Malformed if the row does not match the format."""

PARSERS: dict[str, Parser] = {
    "chat": parse_chat,
    "instruction": parse_instruction,
    "prompt_completion": parse_prompt_completion,
    "text": parse_text,
    "preference": parse_preference,
    "unpaired_preference": parse_unpaired_preference,
    "prompt": parse_prompt,
}


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


def demand_alike(first: Any, first_name: str, second: Any, second_name: str) -> None:
    """Refuse a row that mixes text and messages."""
    if isinstance(first, list) != isinstance(second, list):
        raise Malformed(
            f"{first_name!r} is {kind(first)} and {second_name!r} {kind(second)}: both are text, or both "
            "are lists of messages"
        )


def conversation(value: Any, name: str, fields: Mapping[str, str]) -> Messages:
    return parse_messages(value, name, fields, f"{name!r} message")
