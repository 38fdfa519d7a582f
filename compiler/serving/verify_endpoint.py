"""What an endpoint says greedily to prompts of odd and different lengths: token ids and log probabilities."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.errors import UserError
from runtime.serving.client import STATUS, Client, ServerError, pick

ALTERNATIVES = 5
"""Log probabilities that are asked for at each step; vLLM tells at most 20 by default."""

TEXTS = (
    "Paris",
    "The opposite of hot is",
    "Water boils at one hundred degrees, and",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    # Writing that tokenizers part differently.
    "Größe, façade, Ελλάδα, 東京, 🌍 and 3,141.59;\tthe next",
)

CHATS: tuple[tuple[str, ...], ...] = (
    ("What is the capital of France?",),
    ("Write one line about rain.\n\nNo rhymes.",),
    ("My name is Ada.", "Hello Ada!", "What is my name?"),
)
"""Turns of user and assistant."""

SENTENCE = (
    "Once upon a time there was a baker who kneaded the dough, waited an hour, shaped twelve loaves and lit "
    "her oven; and each morning, when the bells rang, the whole street came to her door. "
)
"""Repeated for a prompt that is longer than a sliding window."""


@dataclass(frozen=True)
class Case:
    """A prompt: `text` to go on with, or the `messages` of a chat."""

    title: str
    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None

    @property
    def kind(self) -> str:
        return "text" if self.messages is None else "chat"


@dataclass(frozen=True)
class Reply:
    """What the endpoint said.

    Attributes:
        prompt: token ids, as the server's tokenizer and template made them.
        tokens: of the answer.
        top: at each step, log probabilities of the likeliest tokens.
    """

    case: Case
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    top: tuple[Mapping[int, float], ...]


def built_in(long_repeats: int, chat: bool) -> list[Case]:
    """The prompts that every endpoint is asked.

    Args:
        long_repeats: of the sentence in the long prompt; 0 leaves it out.
        chat: whether the tokenizer has a template.
    """
    cases = [Case(_title(text), text) for text in TEXTS]
    if long_repeats:
        cases.append(Case(f"a long text: {_title(SENTENCE)}", SENTENCE * long_repeats + "One day"))
    if chat:
        for turns in CHATS:
            roles = ("user", "assistant")
            messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]
            cases.append(Case(_title(turns[-1]), messages=messages))
    return cases


def _title(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 40 else f"{words[:37]}..."


def find_model(client: Client, wanted: str | None, flag: str) -> tuple[str, int | None]:
    """The name to ask for and the server's longest context, where it tells.

    Raises:
        UserError: when it is not served.
    """
    cards = pick(client.get("/v1/models"), "/v1/models", "data", kind=list)
    served = {pick(card, "/v1/models", "id", kind=str): card for card in cards}
    lengths = [card.get("max_model_len") for card in cards if isinstance(card.get("max_model_len"), int)]
    longest = min(lengths) if lengths else None
    if wanted is None and len(served) == 1:
        return next(iter(served)), longest
    listed = ", ".join(served) or "nothing"
    if wanted is None:
        raise UserError(f"{client.url} serves {listed}: which of them is meant?", f"{flag} NAME")
    if wanted not in served:
        raise UserError(
            f"{client.url} serves {listed}, and not {wanted}",
            f"give the address of {wanted}'s server, or the name that it is served by with {flag}",
        )
    return wanted, longest


def ask(client: Client, model: str, case: Case, tokens: int) -> Reply:
    """The endpoint's greedy answer.

    Args:
        tokens: at most, of the answer.

    Raises:
        UserError: when it does not answer, or tells no token ids.
    """
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": tokens,
        "temperature": 0,
        # generation_config.json may set another one, and vLLM reads it.
        "repetition_penalty": 1.0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if case.messages is None:
        path = "/v1/completions"
        body |= {"prompt": case.text, "logprobs": ALTERNATIVES}
    else:
        path = "/v1/chat/completions"
        body |= {"messages": case.messages, "logprobs": True, "top_logprobs": ALTERNATIVES}
    answer = client.post(path, body)
    choice = pick(answer, path, "choices", 0, kind=dict)
    prompt = choice.get("prompt_token_ids") or answer.get("prompt_token_ids")
    if not isinstance(prompt, list) or not isinstance(choice.get("token_ids"), list):
        raise UserError(
            f"{client.url} tells no token ids: answers can be compared with vLLM 0.10.2 or later alone",
            "serve it with the recipe's own image",
        )
    said = pick(choice, path, "token_ids", kind=list)
    try:
        top = _top(choice, case)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise ServerError(
            f"{path} answers without proper log probabilities", kind=STATUS, status=200
        ) from None
    if len(top) != len(said):
        raise ServerError(
            f"{path} tells log probabilities of {len(top)} of {len(said)} tokens", kind=STATUS, status=200
        )
    return Reply(case, tuple(prompt), tuple(said), top)


def _top(choice: Mapping[str, Any], case: Case) -> tuple[Mapping[int, float], ...]:
    logprobs = choice["logprobs"]
    if case.messages is None:
        steps = [list(step.items()) for step in logprobs["top_logprobs"]]
    else:
        steps = [
            [(top["token"], top["logprob"]) for top in step["top_logprobs"]] for step in logprobs["content"]
        ]
    return tuple(
        {
            int(token.removeprefix("token_id:")): float(value)
            for token, value in step
            # -9999 stands for a probability of 0.
            if math.isfinite(value) and value > -9000
        }
        for step in steps
    )
