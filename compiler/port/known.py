"""The keys that the tools know, with types and defaults: data/dialects.json, made by scripts/dialects.py."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent.parent / "data" / "dialects.json"


@functools.cache
def tools() -> Mapping[str, Any]:
    """The whole of data/dialects.json."""
    data: dict[str, Any] = json.loads(DATA.read_text(encoding="utf-8"))
    return data


def keys(tool: str, *sections: str) -> dict[str, list[Any]]:
    """The keys of some sections: [type] for one that must be given, else [type, default]."""
    found = tools()[tool]["sections"]
    return {key: entry for section in sections for key, entry in found[section].items()}


def defaults(tool: str, *sections: str) -> dict[str, Any]:
    """The defaults of some sections' keys, without those that the tool computes."""
    return {
        key: entry[1]
        for key, entry in keys(tool, *sections).items()
        if len(entry) > 1 and not (isinstance(entry[1], dict) and "is" in entry[1])
    }


def version(tool: str) -> str:
    """The version of the tool that the keys are of."""
    return str(tools()[tool]["version"])
