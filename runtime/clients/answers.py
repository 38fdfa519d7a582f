"""Requests greedy answers: whole, streamed with the arrival times of chunks, or with log probabilities."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .client import Client, pick
from .findings import CheckFailed

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

SCHEDULED = Path("/proc/thread-self/schedstat")

LIKELIEST = 5
"""Number of candidates per token whose log probabilities are requested."""


@dataclass(frozen=True)
class Whole:
    """An answer to a request without streaming.

    Attributes:
        text: the reasoning, if the server separates it, and the answer.
        tokens: ids; None if the server does not report them.
    """

    text: tuple[str, str]
    tokens: list[int] | None
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Streamed:
    """An answer that arrived in chunks.

    Attributes:
        text, tokens, finish_reason: as in `Whole`.
        times: seconds from the request to each chunk that had content.
        first_tokens: number of tokens in the first of them.
        completion_tokens: from the stream's usage; None without usage.
        held_up: seconds for which this process could have read, but had to wait for a core.
    """

    text: tuple[str, str]
    tokens: list[int] | None
    finish_reason: str
    times: tuple[float, ...]
    first_tokens: int
    completion_tokens: int | None
    held_up: float = 0.0

    @property
    def first(self) -> float:
        """Return the seconds to the first token."""
        return self.times[0]

    @property
    def last(self) -> float:
        """Return the seconds to the last token."""
        return self.times[-1]

    @property
    def read_late(self) -> bool:
        """Return whether this machine was too busy for `times` to mean anything."""
        return self.held_up > self.last / 2

    @property
    def rate(self) -> float | None:
        """Return the tokens per second after the first chunk; None if there are too few."""
        if self.completion_tokens is None or self.last <= self.first:
            return None
        rest = self.completion_tokens - self.first_tokens
        return rest / (self.last - self.first) if rest > 0 else None


@dataclass(frozen=True)
class Scored:
    """A greedy answer with the log probabilities of the likeliest tokens at each step, by token id."""

    text: str
    tokens: list[int]
    logprobs: list[dict[int, float]]


@dataclass(frozen=True)
class ServedModel:
    """A model on a server.

    Attributes:
        name: the served name.
        chat: whether a prompt is sent as a user's turn; otherwise the model continues it as text.
    """

    client: Client
    name: str
    chat: bool = True

    @property
    def path(self) -> str:
        return CHAT if self.chat else COMPLETIONS

    def question(self, prompt: str, max_tokens: int, **more: Any) -> dict[str, Any]:
        """Return the body of a request."""
        asked = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {"model": self.name, **asked, "max_tokens": max_tokens, "temperature": 0}
        return body | {"return_token_ids": True} | more

    def whole(self, body: Mapping[str, Any]) -> Whole:
        """Send a request and return the answer."""
        answer = self.client.post(self.path, body)
        choice = pick(answer, self.path, "choices", 0, kind=dict)
        message = pick(choice, self.path, "message", kind=dict) if self.chat else choice
        tokens = choice.get("token_ids")
        return Whole(
            (_text(message.get("reasoning")), _text(message.get("content" if self.chat else "text"))),
            tokens if isinstance(tokens, list) else None,
            pick(choice, self.path, "finish_reason", kind=str),
            pick(answer, self.path, "usage", "prompt_tokens", kind=int),
            pick(answer, self.path, "usage", "completion_tokens", kind=int),
        )

    def streamed(self, body: Mapping[str, Any]) -> Streamed:
        """Send a request with streaming, and return the answer with the times of its chunks.

        Raises:
            CheckFailed: the stream holds no token, or does not say why it ended.
        """
        what = f"the stream of {self.path}"
        thought = text = ""
        tokens: list[int] = []
        told = True
        times: list[float] = []
        first_tokens = 0
        finish_reason = usage = None
        started, waited = time.monotonic(), _waited()
        for event in self.client.stream(self.path, {**body, "stream_options": {"include_usage": True}}):
            now = time.monotonic() - started
            usage = event.get("usage") or usage
            for choice in pick(event, what, "choices", kind=list):
                delta = pick(choice, what, "delta", kind=dict) if self.chat else pick(choice, what, kind=dict)
                parts = _text(delta.get("reasoning")), _text(delta.get("content" if self.chat else "text"))
                ids = choice.get("token_ids")
                finish_reason = choice.get("finish_reason") or finish_reason
                if not ids and not any(parts):
                    continue
                times.append(now)
                thought, text = thought + parts[0], text + parts[1]
                told = told and isinstance(ids, list)
                tokens += ids if isinstance(ids, list) else []
                first_tokens = first_tokens or len(tokens) or 1
        if not times:
            raise CheckFailed("the stream ended without a token", "look at the server's log")
        if not isinstance(finish_reason, str):
            raise CheckFailed(
                "the stream ended without a finish_reason", "check whether a proxy ends the stream early"
            )
        completed = None
        if usage is not None:
            completed = pick(usage, "the stream's usage", "completion_tokens", kind=int)
        return Streamed(
            (thought, text),
            tokens if told else None,
            finish_reason,
            tuple(times),
            first_tokens,
            completed,
            _waited() - waited,
        )

    def prompt_tokens(self, prompt: str) -> list[int]:
        """Return a prompt's token ids; a user's turn goes through the served chat template."""
        answer = self.client.post(self.path, self.question(prompt, 1))
        where = () if self.chat else ("choices", 0)
        return pick(answer, self.path, *where, "prompt_token_ids", kind=list)

    def scored(self, prompt: Sequence[int], max_tokens: int) -> Scored:
        """Answer a prompt of token ids greedily, with log probabilities."""
        body = {
            "model": self.name,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": LIKELIEST,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }
        choice = pick(self.client.post(COMPLETIONS, body), COMPLETIONS, "choices", 0, kind=dict)
        tokens = pick(choice, COMPLETIONS, "token_ids", kind=list)
        steps = pick(choice, COMPLETIONS, "logprobs", "top_logprobs", kind=list)
        if not tokens or not steps:
            raise CheckFailed(f"{self.name} answers without a token", "look at the server's log")
        return Scored(
            pick(choice, COMPLETIONS, "text", kind=str),
            tokens,
            [_by_id(pick(step, f"{COMPLETIONS} (top_logprobs)", kind=dict)) for step in steps],
        )


def _by_id(step: Mapping[str, Any]) -> dict[int, float]:
    """Return log probabilities by token id, from names like "token_id:42"."""
    out = {}
    for name, value in step.items():
        number = name.partition("token_id:")[2]
        if not number.isdecimal() or not isinstance(value, (int, float)):
            raise CheckFailed(
                f"{COMPLETIONS} names tokens differently from vLLM", "check that this is vLLM's address"
            )
        if not math.isfinite(value):
            broken = "the weights or their numerics are broken"
            raise CheckFailed("a log probability is not a finite number", broken)
        out[int(number)] = float(value)
    return out


def _waited() -> float:
    """Return the seconds for which this thread has waited for a core, as Linux counts them; else 0."""
    try:
        return int(SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def first_difference(left: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first index where two lists of tokens differ; None if they are the same."""
    for place, (a, b) in enumerate(zip(left, other)):  # noqa: B905 (strict is for equal lengths)
        if a != b:
            return place
    return None if len(left) == len(other) else min(len(left), len(other))
