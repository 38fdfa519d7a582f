"""A run's answers to its sample prompts, from samples.jsonl."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from recipec.compiler.json_value import json_value
from recipec.compiler.pages.html import Table
from recipec.compiler.report.metrics import spread

SAMPLES = "samples.jsonl"
STEPS, LONGEST = 6, 600
"""Most steps shown for each prompt, and most characters of a text."""


def parse(text: str) -> list[Mapping[str, Any]]:
    """Return the lines of the file that can be read."""
    found = [json_value(line) for line in text.split("\n")]  # splitlines() would cut within an answer
    return [one for one in found if isinstance(one, dict) and type(one.get("step")) is int]


def table(samples: Sequence[Mapping[str, Any]]) -> Table | None:
    """Tabulate the answers to each prompt, step by step; None without any."""
    by_prompt: dict[str, dict[int, Any]] = {}
    for one in samples:
        by_prompt.setdefault(_told(one.get("prompt")), {})[one["step"]] = one.get("answer")
    rows = []
    for prompt, answers in by_prompt.items():
        steps = sorted(answers)
        for index in spread(len(steps), STEPS):
            step = steps[index]
            rows.append((prompt if not index else "", f"{step:,}", _short(str(answers[step]))))
    if not rows:
        return None
    return Table(("prompt", "step", "answer"), rows, words=(0, 2), label="Samples")


def _told(prompt: Any) -> str:
    """Return a prompt for display: a text, or the last message."""
    last = prompt[-1] if isinstance(prompt, list) and prompt else prompt
    content = last.get("content") if isinstance(last, dict) else last
    return _short(content if isinstance(content, str) else json.dumps(prompt, ensure_ascii=False))


def _short(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
