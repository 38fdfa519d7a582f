"""config.json as transformers reads it. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def floats(value: Any) -> Any:
    """Convert values of config.json; transformers writes infinity as {"__float__": "Infinity"}."""
    if isinstance(value, Mapping):
        tagged = value.get("__float__")
        return (
            float(tagged) if isinstance(tagged, str) else {key: floats(item) for key, item in value.items()}
        )
    return [floats(item) for item in value] if isinstance(value, list) else value
