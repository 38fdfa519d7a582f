"""Recipe paths, such as `data.train[0].path`: their text and their parts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

Part = str | int
"""A key of a mapping, or an index of a list."""

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
_PART = re.compile(
    r'(?:^|(?!^)\.)(?P<key>[A-Za-z_][A-Za-z0-9_-]*)|\[(?P<index>\d{1,6})\]|\[(?P<quoted>"(?:[^"\\]|\\.)*")\]'
)


def join(parts: Sequence[Part]) -> str:
    """Return the path's text; a key that is not a plain name is written as ["key"]."""
    text = ""
    for part in parts:
        if isinstance(part, int):
            text += f"[{part}]"
        elif _PLAIN.fullmatch(part):
            text += f".{part}" if text else part
        else:
            text += f"[{json.dumps(part, ensure_ascii=False)}]"
    return text


def prefix(text: str) -> tuple[list[tuple[Part, int, int]], int]:
    """Parse the path that a text starts with: its parts with their start and end, and the path's end."""
    out: list[tuple[Part, int, int]] = []
    at = 0
    while (match := _PART.match(text, at)) and not (at == 0 and match["index"]):
        name = next(group for group in ("key", "index", "quoted") if match[group] is not None)
        value = match[name]
        part: Part = int(value) if name == "index" else json.loads(value) if name == "quoted" else value
        out.append((part, match.start(name), match.end(name)))
        at = match.end()
    return out, at


def split(path: str) -> tuple[Part, ...]:
    """Return the parts of a path; none for "".

    Raises:
        ValueError: when the text is not a path.
    """
    parts, end = prefix(path)
    if end != len(path):
        raise ValueError(f"{path!r} is not a path of a recipe")
    return tuple(part for part, _, _ in parts)
