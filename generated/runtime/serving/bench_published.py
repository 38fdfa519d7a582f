"""Figures of others beside a benchmark's own."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MEASURED = "measured"
"""The outcome of a point whose figures count."""

PUBLISHED_KEYS = (
    "input",
    "rate",
    "peak_output_tokens_per_s",
    "usd_per_million_output_tokens",
    "median_ttft_ms",
    "lowest_tpot_ms",
    "highest_tpot_ms",
)


@dataclass(frozen=True)
class Published:
    """Figures of others.

    Attributes:
        source: for a sentence.
        figures: each with some of PUBLISHED_KEYS: "input" in tokens and "rate" in requests/s say what it was
            measured at.
    """

    source: str = ""
    figures: tuple[Mapping[str, float], ...] = ()


def published_word(text: str) -> tuple[str, float]:
    """One KEY=NUMBER of a published figure."""
    key, _, number = text.partition("=")
    if key not in PUBLISHED_KEYS:
        raise argparse.ArgumentTypeError(f"{key} is none of {', '.join(PUBLISHED_KEYS)}")
    return key, float(number)


def published(source: str, figures: Sequence[Sequence[tuple[str, float]]]) -> Published:
    """Published figures as the command line gives them."""
    return Published(source, tuple(dict(figure) for figure in figures))


def source(summary: Mapping[str, Any]) -> str:
    """The sentence above the comparison."""
    return (
        f"Published: {summary['published']['source']}; its requests may have been of another kind and number."
    )


def comparison(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Published figures, and those of this sweep that are of the same thing."""
    rows: list[tuple[str, str, str]] = []
    for figure in summary["published"]["figures"]:
        points = [r for r in summary["points"] if r["input_length"] == figure.get("input", r["input_length"])]
        found = [row for row in points if row["outcome"] == MEASURED]
        part = f", of {len(found)} of {len(points)} points" if len(found) < len(points) else ""
        best = max(found, key=lambda row: row["output_tokens_per_s"], default=None)
        length = f"{figure.get('input', 0):,.0f} tokens in"
        if "peak_output_tokens_per_s" in figure:
            own = f"{best['output_tokens_per_s']:,.0f}{part}" if best else "-"
            theirs = f"{figure['peak_output_tokens_per_s']:,.0f}"
            rows.append((f"peak output tokens/s, {length}", theirs, own))
        if "usd_per_million_output_tokens" in figure:
            usd = best["usd_per_million_output_tokens"] if best else None
            own = "-" if usd is None else f"{usd:.2f}{part}"
            name = f"US$ per million output tokens, {length}"
            rows.append((name, f"{figure['usd_per_million_output_tokens']:.2f}", own))
        if "median_ttft_ms" in figure:
            rate = figure.get("rate", 0)
            own = next((ms(row["median_ttft_ms"]) for row in found if float(row["rate"]) == rate), "-")
            name = f"TTFT in ms, {length}, {rate:g} requests/s"
            rows.append((name, ms(figure["median_ttft_ms"]), own))
        if "lowest_tpot_ms" in figure and "highest_tpot_ms" in figure:
            medians = [row["median_tpot_ms"] for row in found]
            own = f"{ms(min(medians))} to {ms(max(medians))}{part}" if medians else "-"
            low, high = figure["lowest_tpot_ms"], figure["highest_tpot_ms"]
            rows.append(("TPOT in ms, over the sweep", f"{ms(low)} to {ms(high)}", own))
    return rows


def ms(value: float) -> str:
    """Three digits, and all of those before the point."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
