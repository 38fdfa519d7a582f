"""The results of a probe: probe.json, and a table."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import gettempdir
from typing import Any

from ..errors import UserError, say

VERSION = 1
LOCK = "recipe.lock.json"
FIRST = "run probe.py without --try first, with the same --output"
SECONDS = 600
"""Seconds after which no further part begins."""


@contextmanager
def on_disk() -> Iterator[None]:
    """Turn a failed read or write within the block into an error with advice."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError) as error:
        help = f"is there room in --output, --merged and TMPDIR ({gettempdir()}), and is the artifact whole?"
        raise UserError(f"the probe cannot read or write its files: {error}", help) from None


@dataclass
class Report:
    """The results, as in probe.json.

    Attributes:
        rows: rows of the table: what, planned, found.
        notes: differences from the plan that are not numbers.
        problems: a sentence for each mesh, device or merge whose numbers are outside their tolerance.
    """

    data: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    begun: float = field(default_factory=time.monotonic)

    @contextmanager
    def part(self, name: str) -> Iterator[bool]:
        """Run a part of the probe unless the time is over; yield whether it runs."""
        start = time.monotonic()
        begin = start - self.begun < SECONDS
        if begin:
            say(f"probe: {name}")
        else:
            self.notes.append(f"left out, because {SECONDS // 60} minutes are over: {name}")
        yield begin
        if begin:
            self.data.setdefault("seconds", {})[name] = round(time.monotonic() - start, 1)

    def write(self, path: Path) -> None:
        told = {"probe": VERSION, **self.data, "notes": self.notes, "problems": self.problems}
        path.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def digest_of(lock: Mapping[str, Any]) -> str:
    """Return the digest of the resolved recipe, which alone identifies the recipe of a probe."""
    return hashlib.sha256(json.dumps(lock["recipe"], sort_keys=True).encode()).hexdigest()


def gib(size: float | None) -> str:
    return "not told" if size is None else f"{size / 2**30:.2f} GiB"


def table(rows: Sequence[tuple[str, str, str]]) -> str:
    """Format aligned columns: what, planned or allowed, found."""
    every = [("", "planned or allowed", "found"), *rows]
    widths = [max(len(row[column]) for row in every) for column in range(3)]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in every
    )
