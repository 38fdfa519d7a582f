"""What the rows of a data set at hand hold: the columns of its first one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MOST = 1 << 20
"""Bytes of a file that are looked at."""


def first(path: str, folder: Path) -> dict[str, Any] | None:
    """The first row of a JSON or JSON Lines file, or of the first such file of a folder; None for others.

    Args:
        path: as a tool's file has it; what is relative is so to `folder`.
    """
    place = folder / Path(path).expanduser()
    try:
        if place.is_dir():
            files = sorted(file for file in place.iterdir() if file.suffix in (".jsonl", ".json"))
            place = files[0] if files else place
        if place.suffix not in (".jsonl", ".json") or not place.is_file():
            return None
        with place.open(encoding="utf-8") as file:
            head = file.read(MOST)
        row, _ = json.JSONDecoder().raw_decode(head.lstrip().removeprefix("[").lstrip())
    except (OSError, ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
