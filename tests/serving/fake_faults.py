"""Switches for the fake vLLM's faults."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Faults:
    """The faults of a fake server. A test may set them while it runs.

    Attributes:
        unready: the number of /health requests that are answered with 503.
        fail: a status by path, answered with vLLM's JSON for an error.
        html: paths that answer 200 with a page.
        html_errors: paths that answer 502 with a proxy's page.
        redirect: the new address, by path.
        nonsense: paths whose answer is bytes that are not HTTP.
        half: paths whose answer ends in its middle.
        shape: other JSON, by path.
        fail_stream: events after which a stream reports an error, as vLLM does when its engine dies.
        no_done: streams end without [DONE].
        lump: a stream comes in one piece, after its answer is complete.
        wobble: tokens after which a streamed answer differs from one that is not streamed.
        no_usage: answers report no usage.
        accept_all: any model's name is accepted.
        repeat_key: an error repeats the key that was sent.
        pause: seconds before any answer.
        pauses: seconds before an answer, by path.
        token_seconds: seconds between a stream's events.
        die_after: answered requests, after which the server dies in the middle of the next one.
    """

    unready: int = 0
    fail: dict[str, int] = field(default_factory=dict)
    html: set[str] = field(default_factory=set)
    html_errors: set[str] = field(default_factory=set)
    redirect: dict[str, str] = field(default_factory=dict)
    nonsense: set[str] = field(default_factory=set)
    half: set[str] = field(default_factory=set)
    shape: dict[str, Any] = field(default_factory=dict)
    fail_stream: int | None = None
    no_done: bool = False
    lump: bool = False
    wobble: int | None = None
    no_usage: bool = False
    accept_all: bool = False
    repeat_key: bool = False
    pause: float = 0.0
    pauses: dict[str, float] = field(default_factory=dict)
    token_seconds: float = 0.0
    die_after: int | None = None
