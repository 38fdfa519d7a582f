"""The data of a rehearsal: short chats, all different, in the format that the recipe reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SUBJECTS = ("the river", "a baker", "her brother", "the old bridge", "a small boat", "the night train")
DEEDS = ("crosses", "carries", "repairs", "remembers", "counts")
OBJECTS = ("the valley", "seven loaves", "a red lantern", "the market", "every stone")


def conversations(count: int) -> list[list[dict[str, str]]]:
    """Chats of one or two turns, all different, between some 20 and 80 tokens of a miniature's tokenizer."""
    rows = []
    for i in range(count):
        number = i * 37 % 101
        who = SUBJECTS[i % len(SUBJECTS)]
        deed = DEEDS[i // len(SUBJECTS) % len(DEEDS)]
        what = OBJECTS[number % len(OBJECTS)]
        row = [
            {"role": "user", "content": f"Say in one line what {who} does on day {number}."},
            {"role": "assistant", "content": f"On day {number} {who} {deed} {what}."},
        ]
        if i % 3 == 0:
            row += [
                {"role": "user", "content": "And the day after?"},
                {"role": "assistant", "content": f"On day {number + 1} {who} rests."},
            ]
        rows.append(row)
    return rows


def row_of(messages: Sequence[dict[str, str]], format: str) -> dict[str, Any]:
    """A chat as a row of a format of `data.format`; all but its first turn are left out where there is no
    room for them."""
    prompt, answer = messages[0]["content"], messages[1]["content"]
    if format == "chat":
        return {"messages": list(messages)}
    if format == "instruction":
        return {"instruction": prompt, "input": "", "output": answer}
    if format == "prompt_completion":
        return {"prompt": prompt, "completion": f" {answer}"}
    if format == "preference":
        worse = " ".join(reversed(answer.split()))
        return {"prompt": prompt, "chosen": f" {answer}", "rejected": f" {worse}"}
    return {"text": f"{prompt} {answer}"}
