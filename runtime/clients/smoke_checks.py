"""The individual checks of smoke.py. Each returns its finding, and raises UserError to fail.

The last one compares a fine-tuned model with its base, by greedy answers and their log probabilities.
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64encode
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .answers import Scored, ServedModel, Streamed, Whole, first_difference
from .client import Client, ServerError
from .findings import CheckFailed, Finding, quoted

UNKNOWN = "no-such-model"

ROUTES = (
    *("/invocations", "/tokenize", "/detokenize", "/pooling", "/classify", "/score", "/rerank"),
    *("/metrics", "/load", "/server_info", "/tokenizer_info", "/docs", "/redoc", "/openapi.json"),
    *("/start_profile", "/stop_profile", "/reset_prefix_cache", "/reset_mm_cache", "/sleep", "/wake_up"),
    *("/collective_rpc", "/scale_elastic_ep", "/load_lora_adapter", "/unload_lora_adapter"),
)
"""Routes of various vLLM versions that its API key does not protect. /invocations runs the model."""

FIRST = "Name three colors of the rainbow."
SECOND = "Count from one to twenty in words."
"""A different prompt, so that the server cannot reuse its cache of the first request."""

SHOWN, SIDE = "Which color is this?", 64
"""A question about a picture, and the picture's width in pixels."""

ANSWER_TOKENS = 32
PACED_TOKENS = 64

TIE = 0.1
"""Two tokens whose log probabilities are this close may swap places, because batching changes the order of
sums in bfloat16."""

TOGETHER_SECONDS = 5e-4
"""Mean seconds between chunks. No decode step is this fast: faster chunks were buffered and sent together."""

STREAMS = 5
"""Number of streams to try. One must arrive chunk by chunk; a server short of CPU time sends many at once."""

PAUSES = 3
"""Number of longest pauses between chunks to ignore: this machine may have been busy."""

TELLING_SECONDS = 0.05
"""An answer that takes less time does not show how its chunks arrive."""


def served(client: Client, name: str, base: str | None) -> Finding:
    """Check that /v1/models lists `name` and, if it is an adapter, its base."""
    cards = client.cards()
    names = list(cards)
    missing = [wanted for wanted in (name, base) if wanted is not None and wanted not in names]
    if missing:
        raise CheckFailed(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not served: the server has "
            f"{', '.join(names) or 'no model'}",
            "is this recipe's server at this address?",
        )
    warnings: tuple[str, ...] = ()
    if base is not None and cards[name].get("parent", base) is None:
        warnings = (f"{name} is served as a separate model, not as an adapter: is --lora-modules set?",)
    return Finding(", ".join(names), warnings=warnings)


def version(client: Client, checked: str | None) -> Finding:
    """Compare vLLM's version with the one that the recipe's flags were checked against."""
    if client.local:
        return Finding(f"no server: {client.about} answers", checked=False)
    running = client.version()
    if running is None:
        return Finding("the server does not report its version", checked=False)
    warnings: tuple[str, ...] = ()
    if checked is not None and running.partition("+")[0] != checked:
        warnings = (
            f"the recipe's flags were checked against {checked}: another version may read them differently",
        )
    return Finding(f"vLLM {running}", warnings=warnings)


def key(model: ServedModel, demanded: bool) -> Finding:
    """Check that a request without a key, or with a wrong key, gets status 401."""
    path, body = model.path, model.question(FIRST, 1)
    stranger, wrong = model.client.with_key(""), model.client.with_key("wrong")
    attempts = (
        ("/v1/models without a key", lambda: stranger.get("/v1/models")),
        (f"{path} without a key", lambda: stranger.post(path, body)),
        (f"{path} with a wrong key", lambda: wrong.post(path, body)),
    )
    for what, attempt in attempts:
        try:
            attempt()
        except ServerError as error:
            if error.status != 401:
                raise
            continue
        if not demanded:
            return Finding("the server requires no key, although one is set here", checked=False)
        raise CheckFailed(
            f"{what} is answered", "start the server with VLLM_API_KEY set: anyone may use it now"
        )
    unguarded = _unguarded(stranger)
    told = f"asked for no key: {', '.join(unguarded)}; let a proxy or a firewall pass only /v1 and /health"
    return Finding("401 without it", warnings=(told,) if unguarded else ())


def _unguarded(stranger: Client) -> list[str]:
    """Return the server's routes outside /v1 that do not require the key.

    Each is requested by GET. A route that changes something does not accept GET and answers 405.
    """
    routes = []
    for path in ROUTES:
        try:
            stranger.text(path)
        except ServerError as error:
            if error.status in (None, 401, 403, 404) or error.status >= 500:
                continue
        routes.append(path)
    return routes


def unknown(model: ServedModel) -> Finding:
    """Check that a request for an unknown model gets status 404."""
    try:
        model.client.post(model.path, model.question(FIRST, 1, model=UNKNOWN))
    except ServerError as error:
        if error.status != 404:
            raise
        return Finding("404")
    raise CheckFailed(f"a request for `{UNKNOWN}` is answered", "does a router answer in the server's place?")


def picture(model: ServedModel) -> Finding:
    """Check that a question about a picture is answered, and that the picture adds tokens to the prompt."""
    address = f"data:image/png;base64,{b64encode(_png()).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": address}}, {"type": "text", "text": SHOWN}]
    without = model.whole(model.question(SHOWN, 1))
    body = {**model.question(SHOWN, ANSWER_TOKENS), "messages": [{"role": "user", "content": parts}]}
    answer = model.whole(body)
    tokens = answer.prompt_tokens - without.prompt_tokens
    if tokens < 1:
        raise CheckFailed(
            "the picture adds no token to the prompt",
            "does the server leave pictures out (--limit-mm-per-prompt, --language-model-only)?",
        )
    return Finding(f"{tokens} tokens: {quoted(''.join(answer.text))}", figures={"picture_tokens": tokens})


def _png() -> bytes:
    """Return a PNG file: a red picture of SIDE x SIDE pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + bytes((220, 30, 30)) * SIDE) * SIDE)
    chunks = chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def base_model(client: Client) -> str:
    """Return the name of the server's model that is not an adapter."""
    for name, card in client.cards().items():
        if card.get("parent") is None:
            return name
    raise CheckFailed(f"{client.url} serves only adapters")


class SmokeAnswers:
    """Three requests: a streamed one, the same one without streaming, and a longer stream for timing."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.body = model.question(FIRST, ANSWER_TOKENS)
        # Generates past the end token, so that there is enough to time.
        self.paced = model.question(SECOND, PACED_TOKENS, ignore_eos=True)
        self.stream: Streamed | None = None
        self.answer: Whole | None = None

    def first_request(self) -> Finding:
        """Send the first request that the server gets from here, streamed."""
        self.stream = stream = self.model.streamed(self.body)
        return Finding(
            f"first token after {_seconds(stream.first)}",
            figures={"ttft_first_seconds": round(stream.first, 4)},
        )

    def completion(self) -> Finding:
        """Check an answer without streaming."""
        self.answer = answer = self.model.whole(self.body)
        if answer.finish_reason not in ("stop", "length"):
            raise CheckFailed(f"the answer ended by `{answer.finish_reason}`", "look at the server's log")
        if answer.completion_tokens < 1 or answer.prompt_tokens < 1:
            raise CheckFailed(
                f"the usage tells {answer.prompt_tokens} tokens of the prompt and {answer.completion_tokens} "
                "of the answer"
            )
        text = "".join(answer.text)
        warnings = () if text.strip() else ("the answer is empty: does the chat template fit the model?",)
        tokens = "1 token" if answer.completion_tokens == 1 else f"{answer.completion_tokens} tokens"
        return Finding(f"{tokens}: {quoted(text)}", warnings=warnings)

    def streaming(self) -> Finding:
        """Check that the streamed answer equals the other, and that chunks arrive one by one; time them."""
        notes = []
        if self.stream is not None and self.answer is not None:
            notes += self._same(self.stream, self.answer)
        paced, told = self._paced()
        notes += told
        if paced.completion_tokens is None:
            raise CheckFailed("the stream reports no usage", "stream_options.include_usage was requested")
        if paced.tokens is not None and paced.completion_tokens != len(paced.tokens):
            raise CheckFailed(
                f"the stream held {len(paced.tokens)} tokens, and its usage tells {paced.completion_tokens}"
            )
        rate = None if paced.read_late else paced.rate
        pace = "" if rate is None else f", then {rate:.3g} tokens/s"
        figures: dict[str, Any] = {"ttft_seconds": round(paced.first, 4)}
        if rate is not None:
            figures["tokens_per_second"] = round(rate, 2)
        text = f"{len(paced.times)} chunks; second request: first token after {_seconds(paced.first)}{pace}"
        return Finding(text, tuple(notes), figures=figures)

    def _paced(self) -> tuple[Streamed, list[str]]:
        """Return a stream whose chunks arrive one by one, and notes about it."""
        for _ in range(STREAMS - 1):
            stream = self.model.streamed(self.paced)
            with suppress(CheckFailed):
                told = came_one_by_one(stream)
                if not stream.read_late:
                    return stream, told
        stream = self.model.streamed(self.paced)
        return stream, came_one_by_one(stream)

    def _same(self, stream: Streamed, answer: Whole) -> list[str]:
        """Check that both answers are equal; return a note if only rounding made them differ.

        The last characters may lack bytes of tokens that were not generated; a stream leaves them out.
        """
        parts = [
            tuple(text.rstrip("\N{REPLACEMENT CHARACTER}") for text in reply.text)
            for reply in (stream, answer)
        ]
        if parts[0] == parts[1]:
            if stream.completion_tokens is not None and stream.completion_tokens != answer.completion_tokens:
                raise CheckFailed(
                    f"the streamed answer's usage tells {stream.completion_tokens} tokens, the whole one's "
                    f"{answer.completion_tokens}"
                )
            return []
        at = None
        if stream.tokens is not None and answer.tokens is not None:
            at = first_difference(stream.tokens, answer.tokens)
        margin = None if at is None else self._margin(answer, at)
        if at is not None and margin is not None and margin < TIE:
            return [
                f"the streamed answer differs from token {at + 1} on: the two likeliest tokens there are "
                f"{margin:.2g} apart, so the choice depends on numerics"
            ]
        where = "" if at is None else f" from token {at + 1} on"
        raise CheckFailed(
            f"the streamed answer differs from the whole one{where}: {quoted(''.join(stream.text))} "
            f"against {quoted(''.join(answer.text))}",
            "both are greedy: check whether a proxy changes or caches answers",
        )

    def _margin(self, answer: Whole, at: int) -> float | None:
        """Return the gap between the two likeliest tokens at a place of the answer; None if it is unknown."""
        scored = self.model.scored(self.model.prompt_tokens(FIRST), ANSWER_TOKENS)
        if answer.tokens is None or scored.tokens[:at] != answer.tokens[:at] or at >= len(scored.logprobs):
            return None
        likeliest = sorted(scored.logprobs[at].values(), reverse=True)
        return likeliest[0] - likeliest[1] if len(likeliest) > 1 else None


def came_one_by_one(stream: Streamed) -> list[str]:
    """Check that the chunks did not arrive all at once; return notes."""
    help = "a proxy holds the stream back: switch off its buffering"
    if stream.read_late:
        return ["this machine was too busy to tell whether chunks come one by one"]
    chunks = len(stream.times)
    if chunks == 1:
        if (stream.completion_tokens or 0) < 8:
            return ["the answer is too short to tell whether chunks come one by one"]
        tokens = f"all {stream.completion_tokens} tokens"
        raise CheckFailed(f"{tokens} came in one chunk, {_seconds(stream.first)} after the request", help)
    if stream.last < TELLING_SECONDS:
        return ["the answer came too quickly to tell whether chunks come one by one"]
    gaps = sorted(later - earlier for earlier, later in zip(stream.times, stream.times[1:]))  # noqa: B905
    usual = gaps[: max(1, len(gaps) - PAUSES)]
    late = stream.first > stream.last / 2
    if late and sum(usual) / len(usual) < TOGETHER_SECONDS:
        raise CheckFailed(
            f"all {chunks} chunks came at once, {_seconds(stream.first)} after the request", help
        )
    return []


def _seconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


SAME = 1e-4
"""Log probabilities closer than this are equal: one server computes a no-op adapter exactly like the base."""

NUMERICS = 0.05
"""Log probabilities from two servers of one model may differ by this much, in bfloat16."""

COMPARED_TOKENS = 24


@dataclass(frozen=True)
class ComparedAnswers:
    """The answers of both models to one prompt.

    Attributes:
        must: whether the recipe says that the answers differ.
        at: the first token that differs; None if the answers are the same.
        distance: the largest difference of log probabilities up to and including token `at`; up to there, the
            models have read the same tokens.
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


def compare(tuned: ServedModel, base: ServedModel, prompt: str, must: bool) -> ComparedAnswers:
    """Compare both models' answers to the same token ids, made by the fine-tuned model's chat template."""
    tokens = tuned.prompt_tokens(prompt)
    mine, its = tuned.scored(tokens, COMPARED_TOKENS), base.scored(tokens, COMPARED_TOKENS)
    at = first_difference(mine.tokens, its.tokens)
    return ComparedAnswers(prompt, must, mine.text, its.text, at, distance(mine, its, at))


def distance(left: Scored, other: Scored, at: int | None) -> float:
    """Return the largest difference of log probabilities up to and including token `at`.

    If only one model has a token among its likeliest, the other model's log probability of it is at most its
    least listed one. That gives a lower bound of the difference.
    """
    steps = min(len(left.logprobs), len(other.logprobs))
    largest = 0.0
    for a, b in list(zip(left.logprobs, other.logprobs))[: steps if at is None else at + 1]:  # noqa: B905
        for mine, its in ((a, b), (b, a)):
            least = min(its.values(), default=0.0)
            for token, value in mine.items():
                gap = abs(value - its[token]) if token in its else max(0.0, value - least)
                largest = max(largest, gap)
    return largest


def differs(
    tuned: ServedModel, base: ServedModel, prompts: Sequence[tuple[str, bool]], what: str, causes: str
) -> Finding:
    """Compare the two models on prompts; each prompt has a flag that says whether its answers must differ.

    Args:
        what: what is compared with its base: "adapter" or "merge".
        causes: possible causes of a no-op, for the help text.

    Raises:
        CheckFailed: no answer differs, or one does not that must.
    """
    comparisons = [compare(tuned, base, prompt, must) for prompt, must in prompts]
    other = [comparison for comparison in comparisons if comparison.at is not None]
    largest = max(comparison.distance for comparison in comparisons)
    count = f"{len(comparisons)} prompts" if len(comparisons) > 1 else "1 prompt"
    if not other and largest <= SAME:
        raise CheckFailed(
            f"the {what} is a no-op: {tuned.name} answers as {base.name} does, with the same log "
            f"probabilities (within {SAME:g}, {count})",
            causes,
        )
    equal = [comparison for comparison in comparisons if comparison.must and comparison.at is None]
    if equal:
        more = f" and {len(equal) - 1} more" if len(equal) > 1 else ""
        raise CheckFailed(
            f"the answer to {quoted(equal[0].prompt)}{more} is the base's, and serve.smoke_prompts says that "
            f"it differs; log probabilities differ by at most {largest:.2g}",
            "was it trained long enough? use prompts that the training data answers differently from the "
            "base",
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
        text = f"only log probabilities, by up to {largest:.2g} ({base.name})"
    return Finding(
        text,
        tuple(notes),
        figures={
            "base": base.name,
            "prompts": [comparison.record() for comparison in comparisons],
            "different_answers": len(other),
            "logprob_distance": largest,
        },
    )
