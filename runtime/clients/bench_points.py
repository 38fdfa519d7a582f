"""The points of a sweep and their files: one JSON per point, written as a whole or not at all."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ..errors import UserError

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


def differences(before: Mapping[str, Any], now: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """Yield the changes from one set of settings to another: "server.max_model_len 4096 -> 8192"."""
    for key in sorted({*before, *now}):
        old, other = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(other, Mapping):
            yield from differences(old, other, f"{path}{key}.")
        elif old != other:
            yield f"{path}{key} {_word(old)} -> {_word(other)}"


def refuse_other_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    """Refuse a folder that holds results of other settings, which are not mixed.

    Raises:
        UserError: the message says how the settings differ.
    """
    for path in sorted(folder.glob(FILES)):
        before = (read_record(path) or {}).get("settings")
        if isinstance(before, dict) and before != settings:
            changed = list(differences(before, settings))
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise UserError(
                f"{folder} holds results that were measured with other settings: "
                f"{', '.join(changed[:3])}{more}",
                "give another folder with --results, or remove that one",
            )


def _word(value: Any) -> str:
    return "none" if value is None else str(value)
