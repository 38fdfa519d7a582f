"""Parse rows of the format preference: two continuations of one prompt."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .columns import NAMES, NOTHING, PARTS, VAGUE, Unread, column_of, said, unread
from .formats import ParsedSample, filled_text, required, tools_of
from .messages import Messages
from .prompted import conversation, demand_alike
from .values import Malformed, text_of

ANSWER = re.compile(
    r"(?:^|\n)[ \t]*(?:assistant|chatbot|model|gpt|bot|ai)[ \t]*:"
    r"|<\|im_start\|>assistant\n|<\|start_header_id\|>assistant<\|end_header_id\|>\n+|<\|assistant\|>\n?"
    r"|<start_of_turn>model\n|<\|turn>model\n|<｜Assistant｜>|\[/INST\]"
    r"|###[ \t]*(?:assistant|response)[ \t]*:\n*",
    re.IGNORECASE,
)
"""The beginning of an assistant's turn in a conversation that is written as one text, as in HH-RLHF."""


@dataclass(frozen=True)
class PreferenceRow:
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

        def one(answer: Any) -> ParsedSample:
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

        return one(self.chosen), one(self.rejected)


def parse_preference(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> PreferenceRow:
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
    given = row.get(names["prompt"]) or None  # CSV has no nulls
    if not isinstance(chosen, list):
        good, bad = filled_text(row, fields, "chosen"), filled_text(row, fields, "rejected")
        if given is not None:
            asked = filled_text(row, fields, "prompt")
            if "system" in fields or any(PARTS.get(str(name).lower()) == "system" for name in row):
                return _of_turns(origin, row, fields, (asked, good, bad))
            rest = _unread(row, fields, ("prompt",), (asked, good, bad))
            return PreferenceRow(origin, asked, good, bad, unread=rest)
        start = _last_turn(good, bad)
        if start is None:
            raise Malformed(_without_prompt(row, names["prompt"]))
        rest = _unread(row, fields, (), (good, bad))
        return PreferenceRow(origin, good[:start], good[start:], bad[start:], unread=rest)

    liked = conversation(chosen, names["chosen"], fields)
    disliked = conversation(rejected, names["rejected"], fields)
    if isinstance(given, list):
        prompt = conversation(given, names["prompt"], fields)
        if liked[: len(prompt)] == prompt == disliked[: len(prompt)]:
            liked, disliked = liked[len(prompt) :], disliked[len(prompt) :]
    else:
        start = _common(liked, disliked)
        prompt, liked, disliked = liked[:start], liked[start:], disliked[start:]
        if not any(message["role"] == "user" for message in prompt):
            about = f"{names['prompt']!r} is not a list of messages" if given else "no 'prompt'"
            raise Malformed(f"{about}, and chosen and rejected do not begin with the same question")
    for messages, name in ((liked, names["chosen"]), (disliked, names["rejected"])):
        if not any(message["role"] == "assistant" for message in messages):
            raise Malformed(f"no assistant turn in {name!r} after the prompt")
    read = ("prompt", "tools") if isinstance(given, list) else ("tools",)
    rest = _unread(row, fields, read, said([*prompt, *liked, *disliked]))
    return PreferenceRow(origin, prompt, liked, disliked, tools_of(row, fields), rest)


def _of_turns(
    origin: str, row: Mapping[str, Any], fields: Mapping[str, str], texts: tuple[str, str, str]
) -> PreferenceRow:
    """Return a pair of texts with a system message, which may be blank, as conversations."""
    prompt, good, bad = texts
    messages: Messages = [{"role": "user", "content": prompt}]
    system = column_of("system", row, fields)
    if system is not None:
        messages.insert(0, {"role": "system", "content": text_of(row[system], repr(system))})
    liked, disliked = ([{"role": "assistant", "content": answer}] for answer in (good, bad))
    rest = _unread(row, fields, ("prompt", "tools"), (*texts, *said(messages)), system)
    return PreferenceRow(origin, messages, liked, disliked, tools_of(row, fields), rest)


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
