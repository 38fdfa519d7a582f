"""A vLLM server that generates completions for a run: its checks, its adapters and its answers over HTTP.

The server may stop answering, or restart and forget its adapters. A run then waits for it and asks again for
all completions of the step. It does not keep those that were finished: short completions finish first, so
that they would become too frequent.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from ..clients.client import BROKEN, GARBAGE, NO_HOST, REFUSED, SILENT, STATUS, Client, ServerError, pick
from ..errors import UserError, say
from ..interrupts import Interrupted

T = TypeVar("T")

POLL_SECONDS = 1.0
"""Time between two requests to a server that the run waits for."""
HEALTH_SECONDS = 10.0
"""A server that does not answer /health within this time is not ready."""
LISTENING_SECONDS = 0.2
"""How often a run that waits looks for a signal that asks it to stop."""

LOAD, UNLOAD, COMPLETIONS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/completions"
RUNTIME_ADAPTERS = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
"""vLLM's environment variable that allows requests to load adapters."""

PROBED_TEMPERATURE = 2.0
"""The highest temperature that vLLM takes."""
EQUAL = 1e-5
"""Log-probabilities of the likeliest token at temperature 1 and at PROBED_TEMPERATURE that differ by no more
than this, in nats, are computed without the temperature."""


class Answer(NamedTuple):
    """A completion.

    Attributes:
        tokens: with the token that ended it.
        logps: their log-probabilities as the server sampled them, NaN where it reports none.
        stopped: whether a token ended it, rather than its length.
    """

    tokens: list[int]
    logps: list[float]
    stopped: bool


class RolloutServer:
    """A server that completes prompts with the newest adapter.

    Args:
        url: its address.
        wait_seconds: how long a run waits for it, and for an answer.
        at_once: the most requests at a time.
        requested: returns the signal that asks the run to stop, None before there is one.
    """

    def __init__(
        self, url: str, wait_seconds: float, at_once: int, requested: Callable[[], int | None]
    ) -> None:
        self._client = Client(url, timeout=wait_seconds)
        self._wait, self._at_once, self._requested = wait_seconds, at_once, requested
        self._answered = False

    @property
    def url(self) -> str:
        return self._client.url

    def check(self, model: str, longest: int) -> None:
        """Wait until the server answers, and check the model that it serves.

        Args:
            model: the id of the recipe's model, or its folder.
            longest: the most tokens of a prompt with its completion.

        Raises:
            UserError: it serves another model or shorter texts, or does not answer in time.
        """
        cards = self.patiently(self._client.cards)
        bases = {name: card for name, card in cards.items() if not card.get("parent")}
        roots = {str(card.get("root") or name) for name, card in bases.items()}
        hub_ids = {root for root in roots if _is_hub_id(root)}
        if _is_hub_id(model) and hub_ids and model not in hub_ids | bases.keys():
            raise UserError(
                f"the rollout server at {self.url} serves {', '.join(sorted(hub_ids))}, and the recipe "
                f"trains {model}",
                f"start it with {model}, or give the address of another server in rollout.url",
            )
        limits = [card["max_model_len"] for card in bases.values() if card.get("max_model_len")]
        if limits and min(limits) < longest:
            raise UserError(
                f"the rollout server at {self.url} takes {min(limits):,} tokens, and a prompt with its "
                f"completion has up to {longest:,}",
                f"start it with --max-model-len {longest}",
            )

    def check_logprobs(self, adapter: str, prompt: Sequence[int]) -> None:
        """Check that the server's log-probabilities are those that it samples from.

        Raises:
            UserError: they do not depend on the temperature.
        """

        def likeliest(temperature: float) -> float:
            body = {**NEUTRAL, "model": adapter, "prompt": list(prompt), "max_tokens": 1, "logprobs": 1}
            answer = self._client.post(COMPLETIONS, {**body, "temperature": temperature})
            top = pick(answer, COMPLETIONS, "choices", 0, "logprobs", "top_logprobs", 0, kind=dict)
            return max(float(value) for value in top.values())

        plain, divided = self.patiently(lambda: (likeliest(1.0), likeliest(PROBED_TEMPERATURE)))
        if abs(plain - divided) <= EQUAL:
            raise UserError(
                f"the rollout server at {self.url} reports log-probabilities without the temperature",
                "start it with --logprobs-mode processed_logprobs",
            )

    def adapters(self) -> dict[str, str]:
        """Return the folders of the adapters that the server has, by their names."""
        return {
            name: str(card.get("root"))
            for name, card in self.patiently(self._client.cards).items()
            if card.get("parent")
        }

    def load(self, name: str, folder: str, rank: int) -> None:
        """Load an adapter, unless the server has it.

        Args:
            folder: as the server sees it.
            rank: the largest rank of its matrices.

        Raises:
            UserError: the server is not set up for it.
            ServerError: it does not answer.
        """
        if name in self._client.cards():
            return
        try:
            self._client.send(LOAD, {"lora_name": name, "lora_path": folder})
        except ServerError as error:
            raise self._refusal(error, folder, rank) or error from None

    def _refusal(self, error: ServerError, folder: str, rank: int) -> UserError | None:
        """Return what a server lacks that refuses an adapter; None if that is not known."""
        text, where = error.message, f"the rollout server at {self.url}"
        words = text.lower()
        if error.kind != STATUS or error.status in (401, 403, 502, 503, 504):
            return None
        if error.status == 404 and folder not in text:
            return UserError(
                f"{where} cannot load adapters while it runs",
                f"start it with {RUNTIME_ADAPTERS}=1 in its environment, and with --enable-lora",
            )
        if "lora is not enabled" in words:
            return UserError(f"{where} takes no adapters", "start it with --enable-lora")
        if error.status == 404:
            return UserError(
                f"{where} does not see the folder {folder} of the adapter",
                "share the folder of rollout.adapter_path with it; rollout.server_adapter_path is its path "
                "there",
            )
        if "max_lora_rank" in words or "lora rank" in words:
            return UserError(
                f"{where} takes no adapters of rank {rank}", f"start it with --max-lora-rank {_size(rank)}"
            )
        return UserError(f"{where} does not load the adapter: {text}", "look at the server's log")

    def unload(self, name: str) -> None:
        """Let the server forget an adapter, if it has it.

        Raises:
            ServerError: it does not answer.
        """
        try:
            self._client.send(UNLOAD, {"lora_name": name})
        except ServerError as error:
            if error.status != 404:
                raise

    def complete(self, adapter: str, requests: Sequence[Mapping[str, Any]]) -> list[list[Answer]]:
        """Return the completions of each request.

        Args:
            requests: the bodies, without the model.

        Raises:
            UserError: the server refuses one, or an answer is malformed.
            ServerError: it does not answer.
        """

        def one(body: Mapping[str, Any]) -> list[Answer]:
            answer = self._client.post(COMPLETIONS, {**NEUTRAL, **body, "model": adapter})
            choices = pick(answer, COMPLETIONS, "choices", kind=list)
            if len(choices) != body.get("n", 1):
                raise ServerError(f"{self.url} answers with {len(choices)} completions", kind=GARBAGE)
            ordered = sorted(choices, key=lambda choice: int(pick(choice, COMPLETIONS, "index", kind=int)))
            return [self._answer(choice, "logprobs" in body) for choice in ordered]

        return self._all([lambda body=body: one(body) for body in requests])  # type: ignore[misc]

    def _answer(self, choice: Any, scored: bool) -> Answer:
        tokens = pick(choice, COMPLETIONS, "token_ids", kind=list)
        reason = pick(choice, COMPLETIONS, "finish_reason", kind=str)
        if reason == "abort":
            raise ServerError(f"{self.url} ended a completion early", kind=BROKEN)
        logps: list[Any] = [None] * len(tokens)
        if scored:
            logps = pick(choice, COMPLETIONS, "logprobs", "token_logprobs", kind=list)
        if len(logps) != len(tokens):
            message = f"{self.url} answers with {len(tokens)} tokens and {len(logps)} log-probabilities"
            raise ServerError(message, "check that this is vLLM's address", kind=GARBAGE)
        numbers = [float("nan") if value is None else float(value) for value in logps]
        return Answer([int(token) for token in tokens], numbers, reason == "stop")

    def patiently(self, work: Callable[[], T]) -> T:
        """Do work with the server; wait for a server that does not answer, and do the work again.

        Raises:
            UserError: the server does not answer in time, or answers with an error.
            Interrupted: a signal asks the run to stop.
        """
        began, shown = None, ""
        while True:
            try:
                result = work()
                self._answered = True
                return result
            except ServerError as error:
                if not self._gone(error):
                    raise UserError(f"rollouts: {error.message}", error.help) from error
                began = time.monotonic() if began is None else began
                left = began + self._wait - time.monotonic()
                if left <= 0:
                    raise UserError(
                        f"the rollout server does not answer for {self._wait:,.0f} s: {error.message}",
                        "start it again, and continue with --resume; rollout.wait_seconds is how long a run "
                        "waits",
                    ) from error
                if error.message != shown:
                    shown = error.message
                    say(f"waiting for the rollout server, for up to {left:,.0f} s: {shown}")
                self._until_healthy(began + self._wait)

    def _gone(self, error: ServerError) -> bool:
        """Return whether an error may pass when the server has started, or started again. A server that has
        restarted does not know the adapter (404)."""
        if error.kind == STATUS:
            return error.status is not None and (
                error.status >= 500 or (error.status == 404 and self._answered)
            )
        return error.kind in (REFUSED, BROKEN) or (error.kind in (NO_HOST, SILENT) and self._answered)

    def _until_healthy(self, deadline: float) -> None:
        health = self._client.within(HEALTH_SECONDS)
        while True:
            until = min(time.monotonic() + POLL_SECONDS, deadline)
            while time.monotonic() < until:
                self._listen()
                time.sleep(LISTENING_SECONDS)
            if time.monotonic() >= deadline or health.healthy():
                return

    def _listen(self) -> None:
        signum = self._requested()
        if signum is not None:
            raise Interrupted(signum)

    def _all(self, calls: Sequence[Callable[[], T]]) -> list[T]:
        """Return the results of calls, some at a time; the first error, once all that have begun have ended.

        The threads do not keep the process alive: a run that has to stop does not wait for the server.
        """
        todo: queue.SimpleQueue[int] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[int, Any, Exception | None]] = queue.SimpleQueue()
        failed = threading.Event()
        for number in range(len(calls)):
            todo.put(number)

        def worker() -> None:
            while not failed.is_set():
                try:
                    number = todo.get_nowait()
                except queue.Empty:
                    break
                try:
                    done.put((number, calls[number](), None))
                except Exception as error:
                    failed.set()
                    done.put((number, None, error))
            done.put((-1, None, None))

        workers = min(self._at_once, len(calls))
        for _ in range(workers):
            threading.Thread(target=worker, daemon=True).start()
        results: dict[int, T] = {}
        first: Exception | None = None
        while workers:
            try:
                number, result, error = done.get(timeout=LISTENING_SECONDS)
            except queue.Empty:
                self._listen()
                continue
            if number < 0:
                workers -= 1
            elif error is None:
                results[number] = result
            else:
                first = first or error
        if first is not None:
            raise first
        return [results[number] for number in range(len(calls))]


NEUTRAL: Mapping[str, Any] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
}
"""Sampling without changes. A server takes what a request leaves out from the model's generation_config."""

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM's --max-lora-rank takes."""


def _size(rank: int) -> int:
    return next((size for size in RANKS if size >= rank), rank)


def _is_hub_id(name: str) -> bool:
    """Return whether a name looks like an id of the Hugging Face hub rather than a folder."""
    return name.count("/") == 1 and not name.startswith(("/", ".", "~"))
