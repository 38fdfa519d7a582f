"""Holds answers against what they must match, with an end to expressions that would search for ever."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from runtime.limit import TooLong, limit
from runtime.serving.evaluate_answers import Answers, Settings
from runtime.serving.evaluate_prompts import Prompt
from runtime.serving.intervals import pass_at_k

SECONDS = 2.0
"""That one search may take. Python's re can take exponential time: (a+)+$ does."""


@dataclass(frozen=True)
class Judged:
    """How a prompt went on one side.

    Attributes:
        answered, passed: samples that have an answer, and those of them that match.
        cut: answers that `max_tokens` ended.
        missing: samples without an answer.
        undecided: the expression was given up; nothing is said of the prompt.
    """

    prompt: Prompt
    answered: int
    passed: int
    cut: int
    missing: int
    undecided: bool = False

    def rate(self, k: int) -> float | None:
        """pass@k; None where too few samples were answered or judged."""
        return None if self.undecided or self.answered < k else pass_at_k(self.answered, self.passed, k)


def judge(
    prompts: Sequence[Prompt], answers: Answers, settings: Settings, seconds: float = SECONDS
) -> list[Judged]:
    """Every prompt's outcome, in order.

    Args:
        seconds: that one search may take. In the main thread alone: elsewhere searches are not ended.
    """
    return [_one(prompt, answers, settings, seconds) for prompt in prompts]


def _one(prompt: Prompt, answers: Answers, settings: Settings, seconds: float) -> Judged:
    given = answers.of(prompt, settings)
    pattern = re.compile(prompt.expected)
    passed, undecided = 0, False
    try:
        for answer in given:
            with limit(seconds):
                passed += pattern.search(answer.text) is not None
    except (TooLong, RecursionError, MemoryError):
        undecided = True
    cut = sum(answer.cut for answer in given)
    return Judged(prompt, len(given), passed, cut, settings.samples - len(given), undecided)
