"""The points of a sweep and their files: one JSON per point, written as a whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ..errors import UserError

ASIDE = "earlier"
"""Folder, next to the points, of results that were measured with other settings."""

FILES = "input-*-rate-*.json"

QUANTITIES = ("ttft", "tpot", "e2el")
"""Times that a complete result gives as median and 99th percentile, in ms."""

NUMBERS = (
    "duration",
    "completed",
    "failed",
    "total_input_tokens",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    *(f"{part}_{name}_ms" for name in QUANTITIES for part in ("median", "p99")),
)
"""The numbers that a complete result of `vllm bench serve` has."""


@dataclass(frozen=True)
class LoadPoint:
    """One measurement of a sweep.

    Attributes:
        input_length: length of each prompt, in tokens.
        rate: requests/s in plain decimals, or "inf" to send all at once.
    """

    input_length: int
    rate: str

    @property
    def name(self) -> str:
        """Return the stem of the point's file names: "input-512-rate-0.5"."""
        return f"input-{self.input_length}-rate-{self.rate}"

    def __str__(self) -> str:
        load = "all requests at once" if self.rate == "inf" else f"{self.rate} requests/s"
        return f"{self.input_length:,} tokens in, {load}"


def parse_rate(text: str) -> str:
    """Return a request rate in the form that file names use: 4.0 is "4", 5e-1 is "0.5".

    Raises:
        ValueError: it is neither a number above 0 nor inf.
    """
    try:
        rate = Decimal(text.strip())
    except InvalidOperation:
        raise ValueError(f"{text!r} is not a number") from None
    if rate.is_nan() or rate <= 0:
        raise ValueError(f"{text!r} is not above 0")
    if rate.is_infinite():
        return "inf"
    plain = format(rate, "f")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain


def read_record(path: Path) -> dict[str, Any] | None:
    """Read a point's file; None if it is missing or incomplete."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def as_json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def whole(record: Mapping[str, Any] | None) -> bool:
    """Return whether a record holds a measurement in which every request succeeded."""
    if record is None or record.get("failure") is not None or not isinstance(record.get("settings"), dict):
        return False
    result, asked = record.get("result"), record["settings"].get("prompts")
    if not isinstance(result, dict) or lacking(result) is not None:
        return False
    return bool(result["completed"] == asked and result["failed"] == 0)


def lacking(result: Mapping[str, Any]) -> str | None:
    """Return the first number that a result of `vllm bench serve` lacks, or None."""
    for key in NUMBERS:
        value = result.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return key
    return None


def digest(settings: Mapping[str, Any]) -> str:
    """Return eight hexadecimal digits that identify settings."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the changes from one set of settings to another: "server.max_model_len 4096 -> 8192"."""
    for key in sorted({*before, *now}):
        one, other = before.get(key), now.get(key)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{path}{key}.")
        elif one != other:
            yield f"{path}{key} {_word(one)} -> {_word(other)}"


def set_aside(folder: Path, settings: Mapping[str, Any]) -> list[str]:
    """Move results of other settings into folders of their own, and move results of these settings back.

    Args:
        folder: of the results.
        settings: the current settings.

    Returns:
        Sentences that say what was moved, and how the settings differ.

    Raises:
        UserError: a file cannot be moved.
    """
    aside: dict[str, list[Path]] = {}
    told: dict[str, str] = {}
    for path in sorted(folder.glob(FILES)):
        before = (read_record(path) or {}).get("settings")
        if not isinstance(before, dict) or before == settings:
            continue
        name = digest(before)
        aside.setdefault(name, []).append(path)
        changed = list(differences(before, settings))
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        told[name] = ", ".join(changed[:3]) + more
    said = []
    for name, paths in aside.items():
        _move(paths, folder / ASIDE / name)
        said.append(
            f"{_results(len(paths))} measured with other settings ({told[name]}) set aside in "
            f"{folder / ASIDE / name}"
        )
    earlier = folder / ASIDE / digest(settings)
    back = [path for path in sorted(earlier.glob(FILES)) if not (folder / path.name).exists()]
    if back:
        _move(back, folder)
        said.append(f"{_results(len(back))} measured earlier with these settings taken back from {earlier}")
    return said


def _move(paths: Sequence[Path], folder: Path) -> None:
    """Move results together with their logs."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            path.replace(folder / path.name)
            log = path.with_suffix(".log")
            if log.is_file():
                log.replace(folder / log.name)
    except OSError as error:
        raise UserError(
            f"earlier results cannot be moved to {folder}: {error.strerror}",
            "give another folder with --results",
        ) from None


def _results(count: int) -> str:
    return "1 result" if count == 1 else f"{count} results"


def _word(value: Any) -> str:
    return "none" if value is None else str(value)
