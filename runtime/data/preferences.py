"""Parse rows of the format preference: two continuations of one prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .formats import ParsedSample, filled_text, required, tools_of, unused_of
from .messages import Messages
from .prompted import conversation, demand_alike
from .values import Malformed


@dataclass(frozen=True)
class PreferenceRow:
    """Two continuations of one prompt; the first is preferred.

    Attributes:
        origin: as in ParsedSample.
        prompt, chosen, rejected: all text, or all messages as in ParsedSample. `chosen` and `rejected` do not
            repeat the prompt.
        tools, unused: as in ParsedSample.
    """

    origin: str
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: list[dict[str, Any]] | None = None
    unused: tuple[str, ...] = ()

    def answers(self) -> tuple[ParsedSample, ParsedSample]:
        """Return the chosen and the rejected answer, each as a prompt with its completion."""

        def one(answer: Any) -> ParsedSample:
            if isinstance(self.prompt, str):
                return ParsedSample(self.origin, prompt=self.prompt, completion=answer, unused=self.unused)
            start = len(self.prompt)
            return ParsedSample(
                self.origin,
                [*self.prompt, *answer],
                completion_start=start,
                tools=self.tools,
                unused=self.unused,
            )

        return one(self.chosen), one(self.rejected)


def parse_preference(origin: str, row: Mapping[str, Any], fields: Mapping[str, str]) -> PreferenceRow:
    """Parse a row of the format preference.

    If the prompt is missing, or is text while the conversations contain it, the prompt is the common
    beginning of `chosen` and `rejected`, as in TRL's extract_prompt.

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
        unused = unused_of(row, fields)
        if given is not None:
            return PreferenceRow(origin, filled_text(row, fields, "prompt"), good, bad, unused=unused)
        start = _common_text(good, bad)
        if not good[:start].strip():
            raise Malformed("no 'prompt', and chosen and rejected do not begin alike")
        return PreferenceRow(origin, good[:start], good[start:], bad[start:], unused=unused)

    liked = conversation(chosen, names["chosen"], fields)
    disliked = conversation(rejected, names["rejected"], fields)
    if isinstance(given, list):
        prompt = conversation(given, names["prompt"], fields)
        if liked[: len(prompt)] == prompt == disliked[: len(prompt)]:
            liked, disliked = liked[len(prompt) :], disliked[len(prompt) :]
    else:
        start = _common(liked, disliked)
        prompt, liked, disliked = liked[:start], liked[start:], disliked[start:]
        if not prompt:
            about = f"{names['prompt']!r} is not a list of messages" if given else "no 'prompt'"
            raise Malformed(f"{about}, and chosen and rejected do not begin with the same message")
    for messages, name in ((liked, names["chosen"]), (disliked, names["rejected"])):
        if not any(message["role"] == "assistant" for message in messages):
            raise Malformed(f"no assistant turn in {name!r} after the prompt")
    return PreferenceRow(
        origin, prompt, liked, disliked, tools_of(row, fields), unused_of(row, fields, "tools")
    )


def _common(chosen: Messages, rejected: Messages) -> int:
    """Return the number of messages with which both begin; each keeps at least one of its own."""
    shorter = min(len(chosen), len(rejected))
    return next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter - 1)


def _common_text(chosen: str, rejected: str) -> int:
    """Return the number of common first characters, without a space before the first that differs."""
    shorter = min(len(chosen), len(rejected))
    start = next((i for i in range(shorter) if chosen[i] != rejected[i]), shorter - 1)
    return start - 1 if start and chosen[start - 1] == " " else start
