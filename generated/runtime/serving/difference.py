"""Whether a fine-tuned model differs from its base, by its greedy answers and their log probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from runtime.serving.answers import Model, Scored, first_difference
from runtime.serving.findings import Failed, Finding, quoted

SAME = 1e-4
"""Log probabilities closer than this are equal. One server computes a model and its no-op adapter alike."""

NUMERICS = 0.05
"""Two servers of one model may differ by this much, in bfloat16."""

ANSWER_TOKENS = 24


@dataclass(frozen=True)
class Compared:
    """One prompt's answers.

    Attributes:
        must: whether the recipe says that they differ.
        at: the first token that differs, None where the answers are the same.
        distance: the largest difference of log probabilities, at the tokens up to that one: both models have
            read the same there.
    """

    prompt: str
    must: bool
    tuned: str
    base: str
    at: int | None
    distance: float

    def record(self) -> dict[str, Any]:
        return {
            "prompt": self.prompt,
            "must_differ": self.must,
            "answer": self.tuned,
            "base_answer": self.base,
            "first_different_token": self.at,
            "logprob_distance": self.distance,
        }


def compare(tuned: Model, base: Model, prompt: str, must: bool) -> Compared:
    """Both answers to the same token ids: the fine-tuned model's chat template makes them for both."""
    tokens = tuned.prompt_tokens(prompt)
    mine, its = tuned.scored(tokens, ANSWER_TOKENS), base.scored(tokens, ANSWER_TOKENS)
    at = first_difference(mine.tokens, its.tokens)
    return Compared(prompt, must, mine.text, its.text, at, distance(mine, its, at))


def distance(one: Scored, other: Scored, at: int | None) -> float:
    """The largest difference between log probabilities before token `at` and of it.

    A token among the likeliest of one model alone has at most the other's least likely one's log probability
    there: the difference is at least that.
    """
    steps = min(len(one.logprobs), len(other.logprobs))
    largest = 0.0
    for a, b in list(zip(one.logprobs, other.logprobs))[: steps if at is None else at + 1]:  # noqa: B905
        for mine, its in ((a, b), (b, a)):
            least = min(its.values(), default=0.0)
            for token, value in mine.items():
                gap = abs(value - its[token]) if token in its else max(0.0, value - least)
                largest = max(largest, gap)
    return largest


def differs(
    tuned: Model, base: Model, prompts: Sequence[tuple[str, bool]], what: str, causes: str
) -> Finding:
    """Compares the two models on prompts, each with whether its answers must differ.

    Args:
        what: is told from its base: "adapter" or "merge".
        causes: of a no-op, as a help.

    Raises:
        Failed: nothing differs, or an answer that must.
    """
    found = [compare(tuned, base, prompt, must) for prompt, must in prompts]
    other = [one for one in found if one.at is not None]
    largest = max(one.distance for one in found)
    count = f"{len(found)} prompts" if len(found) > 1 else "1 prompt"
    if not other and largest <= SAME:
        raise Failed(
            f"the {what} is a no-op: {tuned.name} answers as {base.name} does, with the same log "
            f"probabilities (within {SAME:g}, {count})",
            causes,
        )
    equal = [one for one in found if one.must and one.at is None]
    if equal:
        more = f" and {len(equal) - 1} more" if len(equal) > 1 else ""
        raise Failed(
            f"the answer to {quoted(equal[0].prompt)}{more} is the base's, and serve.smoke_prompts says that "
            f"it differs; log probabilities differ by at most {largest:.2g}",
            "was it trained long enough? take prompts that the training data answers in its own way",
        )
    notes = []
    if not other:
        notes.append(
            "the greedy answers are the base's: the training changed little, or these prompts are far from "
            "it; name others in serve.smoke_prompts"
        )
        if tuned.client.url != base.client.url and largest <= NUMERICS:
            notes.append(
                f"two servers of one model may differ by {NUMERICS:g}: this may be no difference at all"
            )
    text = f"answers to {len(other)} of {count}, log probabilities by up to {largest:.2g} ({base.name})"
    if not other:
        text = f"log probabilities alone, by up to {largest:.2g} ({base.name})"
    return Finding(
        text,
        tuple(notes),
        figures={
            "base": base.name,
            "prompts": [one.record() for one in found],
            "different_answers": len(other),
            "logprob_distance": largest,
        },
    )
