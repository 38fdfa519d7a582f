"""Waits until a server answers, and says meanwhile what it waits for."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from typing import TextIO

from runtime.errors import UserError
from runtime.progress import duration
from runtime.serving.client import NO_HOST, REFUSED, Client, ServerError

PAUSES = (0.2, 0.5, 1.0, 2.0)
"""Seconds between questions; the last again and again."""

ANSWER_SECONDS = 10.0
"""That one question may take."""

HOPELESS = (400, 401, 403, 404)
"""Statuses of /health that waiting does not change: something else than vLLM answers."""

clock = duration
"""Seconds in words, as progress tells them."""

Say = Callable[[float, str], None]
"""Is told, at every question, the seconds so far and what is being waited for."""


def wait(
    client: Client,
    minutes: float,
    say: Say,
    died: Callable[[], str | None] = lambda: None,
    pauses: tuple[float, ...] = PAUSES,
) -> float:
    """Asks /health until it answers.

    Args:
        minutes: at most.
        died: is asked between questions; a sentence from it ("the server ended with 1") ends the waiting.

    Returns:
        The seconds that it took.

    Raises:
        UserError: not within `minutes`, or it cannot come: the process died, the host is unknown, the server
            answered and then no longer listens.
    """
    started = time.monotonic()
    asking = client.within(ANSWER_SECONDS)
    answered = False
    number = 0
    while True:
        try:
            asking.text("/health")
            return time.monotonic() - started
        except ServerError as error:
            last = error
        reason = died()
        if reason is not None:
            raise UserError(reason, "look at its log")
        if last.kind == REFUSED and answered:
            raise UserError(
                f"the server at {client.url} answered and is gone now: nothing listens there any longer",
                "look at its log: docker compose logs vllm",
            )
        if last.kind == NO_HOST or last.status in HOPELESS:
            raise last
        answered = answered or last.kind != REFUSED
        seconds = time.monotonic() - started
        if seconds >= minutes * 60:
            raise _given_up(client, minutes, last, answered)
        say(seconds, _waited_for(last))
        pause = pauses[min(number, len(pauses) - 1)]
        time.sleep(min(pause, max(0.0, minutes * 60 - seconds)))
        number += 1


def _given_up(client: Client, minutes: float, last: ServerError, answered: bool) -> UserError:
    if not answered:
        return UserError(
            f"nothing listens at {client.url} after {minutes:g} min",
            "is the server started, and does it still load? docker compose ps; docker compose logs vllm",
        )
    return UserError(
        f"the server is not ready after {minutes:g} min: {last.message}",
        "look at its log: docker compose logs vllm",
    )


def _waited_for(error: ServerError) -> str:
    if error.kind == REFUSED:
        return "nothing listens yet (loading and compiling, or not started: docker compose logs vllm)"
    if error.status == 503:
        return "the server listens, and its engine is not ready (503)"
    return error.message


class Waited:
    """Tells of waiting on one line that is rewritten on a terminal, elsewhere in a line now and then.

    Args:
        interval: seconds between lines where the stream is no terminal.
    """

    def __init__(self, stream: TextIO | None = None, interval: float = 30.0) -> None:
        self.stream = stream or sys.stderr
        self.terminal = self.stream.isatty()
        self.interval = interval
        self.next = 0.0
        self.reason = ""
        self.width = 0

    def __call__(self, seconds: float, reason: str) -> None:
        line = f"waiting for the server, {duration(seconds)}: {reason}"
        if self.terminal:
            # A line that wraps could not be rewritten.
            line = line[: shutil.get_terminal_size().columns - 1]
            self.stream.write("\r" + line.ljust(self.width))
            self.width = len(line)
        elif seconds >= self.next or reason != self.reason:
            self.stream.write(line + "\n")
            self.next = seconds + self.interval
        self.reason = reason
        self.stream.flush()

    def end(self) -> None:
        """Takes the line away."""
        if self.terminal and self.width:
            self.stream.write("\r" + " " * self.width + "\r")
            self.stream.flush()
            self.width = 0
