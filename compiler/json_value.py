"""JSON that something else wrote: a run that was killed, another version, or somebody who means harm."""

from __future__ import annotations

import json
from typing import Any

LEVELS = 64
"""Of lists and objects within one another; recipec writes a dozen. Deeper values could not be printed."""


def json_value(content: str | bytes) -> Any:
    """The value of a JSON text; None where it is none, is cut off, or is nested more than LEVELS deep."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    inner = [value]
    for _ in range(LEVELS + 1):
        inner = [part for one in inner for part in _parts(one)]
        if not inner:
            return value
    return None


def _parts(value: Any) -> list[Any]:
    """The lists and objects in one."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [part for part in parts if isinstance(part, dict | list)]
