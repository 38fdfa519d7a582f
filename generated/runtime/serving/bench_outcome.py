"""What came of one run of `vllm bench serve`: all its requests answered in full, or the reason why not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from runtime.serving.bench_points import lacking

KILLED = 137
"""The exit status of a process in a container that got SIGKILL."""

REASON_LENGTH = 200
CUT = 0.02
"""Share by which prompts may be longer or shorter than asked before a note says so."""

SPARE = 8
"""Tokens by which vLLM's random prompts come out longer than asked, at most, as far as was seen."""


def parsed(data: bytes | None) -> dict[str, Any] | None:
    """The JSON that vLLM wrote; None where it wrote none, or a part."""
    try:
        result = json.loads(data or b"", parse_constant=lambda name: None)
    except (ValueError, RecursionError):
        return None
    return result if isinstance(result, dict) else None


def failure(
    status: int,
    result: dict[str, Any] | None,
    log: Path,
    prompts: int,
    output_length: int,
    full: bool = False,
) -> str | None:
    """Why a measurement does not count; None where it does.

    Args:
        status: the exit status.
        result: what vLLM wrote.
        log: its output.
        prompts, output_length: requests and tokens of each answer that were asked for.
        full: whether prompt and answer together are about as long as the server takes.
    """
    if status == KILLED:
        return "vllm bench serve was killed: its container ended, or the machine ran out of memory"
    if status != 0:
        said = last_words(log)
        how = f"was ended by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return f"vllm bench serve {how}{': ' if said else ''}{said}"
    if result is None:
        return "vllm bench serve ended without a whole result"
    missing = lacking(result)
    if missing is not None:
        return f"vllm bench serve ended without a number for {missing}"
    if result["failed"] or result["completed"] != prompts:
        said = request_error(log)
        count = prompts - result["completed"]
        return f"{count} of {prompts} requests failed{': ' if said else ''}{said}"
    wanted, got = prompts * output_length, result["total_output_tokens"]
    if got < wanted:
        # A stream that ends early counts as a completed request for vLLM's client.
        why = "; prompts come out some tokens longer, and the server takes no more" if full else ""
        return f"answers ended early: {got:,} of {wanted:,} tokens came{why}"
    return None


def note(result: dict[str, Any] | None, prompts: int, input_length: int) -> str | None:
    """What to know of a measurement that counts."""
    if result is None:
        return None
    mean = result["total_input_tokens"] / prompts
    if abs(mean / input_length - 1) > CUT and abs(mean - input_length) > 2:
        return f"its prompts had {mean:,.0f} tokens on average"
    return None


def request_error(log: Path) -> str:
    """The first failed request's error, of which vLLM prints up to ten; "" where there is none."""
    match = re.search(r"^Error 0: (.*?)(?=^Error 1: |^tip: |^=+ |\Z)", _text(log), re.DOTALL | re.MULTILINE)
    return _last_line(match[1]) if match else ""


def last_words(log: Path) -> str:
    """The error in which a log ends, or else its last line."""
    text = _text(log)
    errors = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", text, re.MULTILINE)
    return _last_line(errors[-1] if errors else text)


def _text(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 200_000))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    line = "".join(c if c.isprintable() else " " for c in lines[-1]) if lines else ""
    return line if len(line) <= REASON_LENGTH else line[: REASON_LENGTH - 3] + "..."
