"""Parse JSON from an untrusted source: a killed run, another version of recipec, or an attacker."""

from __future__ import annotations

import json
from typing import Any

LEVELS = 64
"""The deepest nesting of lists and objects that is accepted. recipec itself writes about a dozen levels.
Printing deeper values could fail."""


def json_value(content: str | bytes) -> Any:
    """Return the value of a JSON text, or None if it is invalid, cut off, or nested more than LEVELS deep."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    inner = [value]
    for _ in range(LEVELS + 1):
        inner = [part for item in inner for part in _parts(item)]
        if not inner:
            return value
    return None


def _parts(value: Any) -> list[Any]:
    """Return the lists and objects directly inside a value."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, dict | list)]
