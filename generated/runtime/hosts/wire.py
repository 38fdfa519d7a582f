"""What the processes of a run tell each other: JSON objects, one a line, over TCP between process 0 and each.

From a process: {"hello": N, "host": ..., "pid": ..., "of": COUNT, "proof": ...} to the challenge, then
{"beat": [STEP, MICRO-BATCHES]} every second, {"stop": SIGNAL} when it is to stop, {"at": STEP} in answer to
a freeze, {"reached": BARRIER}, {"tell": [NAME, VALUE]}, {"leave": [STATUS, REASON]} before it ends.
From process 0: {"challenge": TEXT} at once, {"waiting": [N, ...]} until all are there, then {"roster":
[[HOST, PID], ...], "port": PORT}; {"absent": [N, ...]} when some did not come, {"refused": REASON},
{"alive": [STEP, ...]} every second, {"freeze": true}, {"stop_after": [STEP, SIGNAL, N]}, {"barrier": NAME,
"missing": [N, ...]}, {"told": [NAME, VALUE]}, {"gone": [N, STATUS or null, REASON]}.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
from typing import Any

Message = dict[str, Any]

SECRET = "RECIPEC_RUN_SECRET"
"""The variable with a text that the processes of a run alone know; what launches them sets it."""

BEAT = 1.0
"""Seconds between two signs of life."""
LONGEST = 1 << 20
"""Bytes of a message."""

ENDED = "it ended without a word"
STRANGE = "what it says cannot be understood"
"""Of a process whose connection is no good any more."""
SENSELESS = (ValueError, TypeError, LookupError, ArithmeticError)
"""What reading a message raises that is JSON, and not what is agreed on."""


def broken(error: OSError) -> str:
    """What became of a process whose connection broke."""
    if error.errno in (errno.ECONNRESET, errno.EPIPE):
        return ENDED
    return f"its connection broke: {error.strerror or error}"


def seconds(name: str, default: float) -> float:
    """A duration from the environment."""
    try:
        return max(2 * BEAT, float(os.environ.get(name, default)))
    except ValueError:
        return default


def start_timeout() -> float:
    """Seconds that the processes of a run have to find each other."""
    return seconds("RECIPEC_START_TIMEOUT", 600.0)


def peer_timeout() -> float:
    """Seconds without a sign of life after which a process counts as gone."""
    return seconds("RECIPEC_PEER_TIMEOUT", 60.0)


def barrier_timeout() -> float:
    """Seconds that the processes of a run wait for each other where they have to, such as for slow data."""
    return seconds("RECIPEC_BARRIER_TIMEOUT", 3600.0)


def proof(challenge: str, number: int) -> str:
    """What a process answers to a challenge: it shows that it knows the run's secret, without telling it."""
    secret = os.environ.get(SECRET, "").encode()
    return hmac.new(secret, f"{challenge} {number}".encode(), "sha256").hexdigest()


def packed(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def unpacked(line: bytes) -> Message:
    """A message; empty for what is none."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def processes(numbers: list[int], count: int) -> str:
    """ "process 1 of 2", "processes 1, 2 and 3 of 4"."""
    words = [str(number) for number in numbers]
    if len(words) == 1:
        return f"process {words[0]} of {count}"
    return f"processes {', '.join(words[:-1])} and {words[-1]} of {count}"
