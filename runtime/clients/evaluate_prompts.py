"""A recipe's own prompts: a JSONL file whose lines have a prompt and the pattern that its answer must match.

    {"prompt": "What is 6 times 7?", "expected": "\\b42\\b"}
    {"messages": [{"role": "user", "content": "What is 6 times 7?"}], "expected": "(?i)forty-two"}

`expected` is a regular expression for Python's `re`, searched for anywhere in the answer.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..untrusted import ENDLESS, INTO_A_FILE, is_endless

LARGEST = 64 * 2**20
"""Largest size of a file of prompts, in bytes."""

ROLES = ("system", "developer", "user", "assistant", "tool")

EXAMPLE = '{"prompt": "What is 6 times 7?", "expected": "42"}'


@dataclass(frozen=True)
class Fault:
    """A fault in a file.

    Attributes:
        kind: "file", "line" or "regex".
        line: counted from 1; None for the file as a whole.
    """

    kind: str
    line: int | None
    message: str
    help: str | None = None


@dataclass(frozen=True)
class Prompt:
    """One line of a file of prompts.

    Attributes:
        line: its number, counted from 1.
        messages: of a chat; None if the model is to continue `text`.
        expected: pattern that the answer must match; "" if the file need not have one.
        digest: of the prompt alone; answers are recorded under it.
    """

    line: int
    messages: Sequence[Mapping[str, Any]] | None
    text: str | None
    expected: str
    digest: str

    @property
    def matches_nothing(self) -> bool:
        """Return whether the pattern matches an empty answer, and thus every answer."""
        return re.search(self.expected, "") is not None and re.search(self.expected, "\0") is not None

    @property
    def title(self) -> str:
        """Return the prompt's last words, on one line."""
        last = self.text if self.messages is None else self.messages[-1]["content"]
        words = " ".join((last if isinstance(last, str) else json.dumps(last, ensure_ascii=False)).split())
        return words if len(words) <= 60 else f"{words[:57]}..."


def read(path: Path, chat: bool = True) -> list[Prompt]:
    """Read the prompts of a file.

    Raises:
        UserError: the file has a fault; the message describes the first and counts the others.
    """
    prompts, faults = parse(path, chat)
    if faults:
        fault = faults[0]
        place = str(path) if fault.line is None else f"{path}:{fault.line}"
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UserError(f"{place}: {fault.message}{more}", fault.help)
    return prompts


def parse(path: Path, chat: bool = True, expected: bool = True) -> tuple[list[Prompt], list[Fault]]:
    """Read the prompts of a file, and return them with all faults.

    Args:
        chat: whether a "prompt" is a user's turn; otherwise the model continues it as text.
        expected: whether each line must have a pattern for its answer.
    """
    if is_endless(path):
        return [], [Fault("file", None, f"it {ENDLESS}", INTO_A_FILE)]
    try:
        if path.stat().st_size > LARGEST:
            return [], [Fault("file", None, f"it is larger than {LARGEST >> 20} MiB")]
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        return [], [Fault("file", None, "there is no such file")]
    except UnicodeDecodeError:
        return [], [Fault("file", None, "it is not UTF-8 text", "save it as UTF-8")]
    except OSError as error:
        return [], [Fault("file", None, f"it cannot be read: {error.strerror}")]
    prompts: list[Prompt] = []
    faults: list[Fault] = []
    seen: dict[str, int] = {}
    # splitlines would also split at U+2028 and similar characters, which JSON strings may hold.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        line_read = _line(number, line, chat, expected)
        if isinstance(line_read, Fault):
            faults.append(line_read)
            continue
        earlier = seen.setdefault(line_read.digest, number)
        if earlier != number:
            faults.append(
                Fault("line", number, f"it asks the same as line {earlier}", "remove one of the two")
            )
        prompts.append(line_read)
    if not prompts and not faults:
        faults.append(Fault("file", None, "it holds no prompts", f"a line is for example {EXAMPLE}"))
    return prompts, faults


def _line(number: int, line: str, chat: bool, expected: bool) -> Prompt | Fault:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        return Fault("line", number, f"it is not JSON: {error.msg} at column {error.colno}", _example())
    except (RecursionError, ValueError):  # ValueError: a number of more than 4,300 digits
        return Fault("line", number, "its JSON is nested too deeply, or has too long a number", _example())
    if not isinstance(row, dict):
        return Fault("line", number, "it is not a JSON object", _example())
    unknown = sorted(row.keys() - {"prompt", "messages", "expected"})
    if unknown:
        return Fault("line", number, f"it has the unknown key `{unknown[0]}`", _example())
    if ("prompt" in row) == ("messages" in row):
        return Fault("line", number, "it must have either `prompt` or `messages`", _example())
    messages, text = row.get("messages"), row.get("prompt")
    if "prompt" in row:
        if not isinstance(text, str) or not text:
            return Fault("line", number, "`prompt` must be a text that is not empty", _example())
        if chat:
            messages, text = [{"role": "user", "content": text}], None
    else:
        wrong = _wrong_messages(messages)
        if wrong:
            return Fault("line", number, wrong, 'messages: [{"role": "user", "content": "..."}]')
    pattern = row.get("expected", None if expected else "")
    if not isinstance(pattern, str):
        return Fault("line", number, "`expected` must be a regular expression, as text", _example())
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        place = "" if getattr(error, "pos", None) is None else f" at position {getattr(error, 'pos', 0)}"
        message = getattr(error, "msg", str(error))
        return Fault(
            "regex",
            number,
            f"`expected` is not a regular expression: {message}{place}",
            "Python's re reads it; in JSON, a backslash is written twice",
        )
    asked = json.dumps([messages, text], sort_keys=True, ensure_ascii=False)
    digest = hashlib.sha256(asked.encode("utf-8", "surrogatepass")).hexdigest()[:16]
    return Prompt(number, messages, text, pattern, digest)


def _wrong_messages(messages: Any) -> str | None:
    if not isinstance(messages, list) or not messages:
        return "`messages` must be a list that is not empty"
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            return f"each of `messages` has a `role`, one of {', '.join(ROLES)}"
        if not isinstance(message.get("content"), str | list):
            return "each of `messages` has a `content`"
    if messages[-1]["role"] == "assistant":
        return "the last of `messages` is the assistant's own: there is nothing left to answer"
    return None


def _example() -> str:
    return f"a line is for example {EXAMPLE}"
