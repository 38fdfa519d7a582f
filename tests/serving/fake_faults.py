"""What goes wrong with the stand-in for vLLM, as switches."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Faults:
    """What goes wrong. All may be set while the server runs.

    Attributes:
        unready: how many questions of /health are answered by 503.
        fail: a status by path, answered with vLLM's JSON for an error.
        html: paths that answer 200 with a page.
        html_errors: paths that answer 502 with a proxy's page.
        redirect: where to, by path.
        nonsense: paths whose answer is bytes that are not HTTP.
        half: paths whose answer ends in its middle.
        shape: paths that answer with JSON of another shape, given.
        cut_stream: events after which a stream's connection ends.
        fail_stream: events after which a stream reports an error, as vLLM does when its engine dies.
        no_done: streams end without [DONE].
        lump: streams come in one piece, when all of the answer is there.
        wobble: tokens after which a streamed answer is another than one that is not streamed.
        no_usage: answers tell no usage.
        accept_all: any model's name is taken.
        ignore_key: the key is not asked for.
        repeat_key: an error repeats the key that was sent.
        pause: seconds before any answer.
        pauses: seconds before an answer, by path.
        token_seconds: between a stream's events.
        die_after: requests for an answer, after which the server dies in the middle of the next.
        stop_after: requests of any kind after which nothing listens any more.
    """

    unready: int = 0
    fail: dict[str, int] = field(default_factory=dict)
    html: set[str] = field(default_factory=set)
    html_errors: set[str] = field(default_factory=set)
    redirect: dict[str, str] = field(default_factory=dict)
    nonsense: set[str] = field(default_factory=set)
    half: set[str] = field(default_factory=set)
    shape: dict[str, Any] = field(default_factory=dict)
    cut_stream: int | None = None
    fail_stream: int | None = None
    no_done: bool = False
    lump: bool = False
    wobble: int | None = None
    no_usage: bool = False
    accept_all: bool = False
    ignore_key: bool = False
    repeat_key: bool = False
    pause: float = 0.0
    pauses: dict[str, float] = field(default_factory=dict)
    token_seconds: float = 0.0
    die_after: int | None = None
    stop_after: int | None = None
