"""Convert values from and to text by YAML 1.2's core schema."""

from __future__ import annotations

import json
import math
import re
from typing import Any

Value = str | int | float | bool | None

_INTEGER = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_WORDS: dict[str, Value] = {
    **dict.fromkeys(["", "~", "null", "Null", "NULL"]),
    **dict.fromkeys(["true", "True", "TRUE"], True),
    **dict.fromkeys(["false", "False", "FALSE"], False),
    **dict.fromkeys([".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"], math.inf),
    **dict.fromkeys(["-.inf", "-.Inf", "-.INF"], -math.inf),
    **dict.fromkeys([".nan", ".NaN", ".NAN"], math.nan),
}
_LONGEST_NUMBER = 300
_SYNTAX = set("{}[],&*#?|<>=!%@`'\"\\")
"""Characters for which `flow` quotes a text, sometimes without need."""
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff]")
"""Control characters, and others that end a line or cannot be seen."""


def scalar(text: str) -> Value:
    """Return the value of a text without quotes."""
    if text in _WORDS:
        return _WORDS[text]
    if len(text) > _LONGEST_NUMBER:
        return text
    for pattern, base in ((_INTEGER, 10), (_OCTAL, 8), (_HEX, 16)):
        if pattern.fullmatch(text):
            return int(text if base == 10 else text[2:], base)
    return float(text) if _FLOAT.fullmatch(text) else text


def flow(value: Any) -> str:
    """Write a value as YAML on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return ".nan" if math.isnan(value) else ".inf" if value > 0 else "-.inf"
    if isinstance(value, str):
        return value if _stands_plain(value) else quoted(value)
    return json.dumps(value)


def quoted(text: str) -> str:
    """Write a text in double quotes, with escapes for control characters."""
    return _CONTROL.sub(lambda control: f"\\u{ord(control[0]):04x}", json.dumps(text, ensure_ascii=False))


def _stands_plain(text: str) -> bool:
    """Return whether a text needs no quotes."""
    return (
        scalar(text) == text
        and not _SYNTAX & set(text)
        and not _CONTROL.search(text)
        and ": " not in text
        and text == text.strip()
        and text[0] not in "-:"
        and not text.endswith(":")
    )
