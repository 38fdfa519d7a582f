"""The summary of a benchmark: its table, its cost, and published figures for comparison."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .bench_points import LoadPoint, as_json, whole
from .bench_server import ServerFacts, ServerMachine
from .markdown_table import cell, table
from .output_files import write_whole

FAILED, NOT_MEASURED = "failed", "not measured"

FIGURES = {
    "requests_per_s": "request_throughput",
    "output_tokens_per_s": "output_throughput",
    "median_ttft_ms": "median_ttft_ms",
    "p99_ttft_ms": "p99_ttft_ms",
    "median_tpot_ms": "median_tpot_ms",
    "p99_tpot_ms": "p99_tpot_ms",
}
"""The summary's names of vLLM's numbers."""

HEADER = (
    "Input tokens",
    "Requests/s",
    "Output tokens/s",
    "TTFT ms",
    "TTFT p99",
    "TPOT ms",
    "TPOT p99",
    "US$ per million",
    "Outcome",
)
"""The table's header; the price is per million output tokens."""


@dataclass(frozen=True)
class HourlyPrice:
    """The price of an hour of the whole machine.

    Attributes:
        usd_per_hour: in US$.
        source: where the price comes from: "list price of 2026-05, ...".
    """

    usd_per_hour: float
    source: str

    def per_million(self, tokens_per_second: float) -> float | None:
        """Return US$ per million output tokens; None if no token was generated."""
        return self.usd_per_hour / (3600 * tokens_per_second) * 1e6 if tokens_per_second else None


@dataclass(frozen=True)
class MeasuredOn:
    """The machine of a benchmark.

    Attributes:
        sentence: names the machine.
        is_accelerator: whether it is the recipe's accelerator, as detected or as the user says.
    """

    sentence: str
    is_accelerator: bool


def place(machine: ServerMachine, accelerator: str, chips: int, told: str, url: str) -> MeasuredOn:
    """Describe the measured machine. It is the recipe's accelerator only if detected or claimed as such.

    Args:
        machine: what was detected.
        accelerator, chips: the recipe's.
        told: what the server runs on according to the user; "" if not given.
    """
    if told:
        same = told.strip().lower() == accelerator.lower()
        return MeasuredOn(f"Measured on {told}, as --machine says, which answered at {url}.", same)
    if accelerator and machine.chips == {accelerator.partition("-")[0]: chips}:
        return MeasuredOn(f"Measured on {accelerator}: {machine.described}.", True)
    sentence = f"Measured on {machine.described}."
    if not accelerator:
        return MeasuredOn(sentence, False)
    if machine.chips is None:
        sentence += f" Nothing shows that it is the recipe's {accelerator}"
        return MeasuredOn(f"{sentence}; if it is, say so with `--machine {accelerator}`.", False)
    return MeasuredOn(
        f"{sentence} It is not the recipe's {accelerator}, so these figures do not hold for that.", False
    )


@dataclass(frozen=True)
class Measurements:
    """The measurements of a sweep, and what the summary shows with them.

    Attributes:
        settings: everything that a figure depends on, except the point.
        records: the record of each point; None if it was not measured.
        left_out: for each point that was left out, the reason.
    """

    model: str
    settings: Mapping[str, Any]
    server: ServerFacts
    place: MeasuredOn
    price: HourlyPrice | None
    published: Published
    records: Sequence[tuple[LoadPoint, Mapping[str, Any] | None]]
    left_out: Sequence[str]

    def summary(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        published = self.published
        return {
            "model": self.model,
            "place": asdict(self.place),
            "server": asdict(self.server),
            "settings": dict(self.settings),
            "price": None if self.price is None else asdict(self.price),
            "published": {
                "source": published.source,
                "figures": [dict(figure) for figure in published.figures],
            },
            "points": [_row(point, record, self.price) for point, record in self.records],
            "left_out": list(self.left_out),
        }


def _row(point: LoadPoint, record: Mapping[str, Any] | None, price: HourlyPrice | None) -> dict[str, Any]:
    row: dict[str, Any] = {**asdict(point), "outcome": NOT_MEASURED, "reason": None, "measured": None}
    if record is None:
        return row
    row["measured"] = record.get("measured")
    if not whole(record):
        reason = record.get("failure")
        return {**row, "outcome": FAILED, "reason": reason} if reason else row
    result = record["result"]
    row |= {name: result[key] for name, key in FIGURES.items()}
    row["usd_per_million_output_tokens"] = price.per_million(row["output_tokens_per_s"]) if price else None
    return {**row, "outcome": MEASURED}


def line(record: Mapping[str, Any]) -> str:
    """Describe a point's outcome in a few words."""
    if record["failure"] is not None:
        return f"failed: {record['failure']}"
    result = record["result"]
    return (
        f"{result['output_throughput']:,.0f} output tokens/s, "
        f"TTFT {ms(result['median_ttft_ms'])} ms, TPOT {ms(result['median_tpot_ms'])} ms"
    )


def write(folder: Path, summary: dict[str, Any]) -> None:
    """Write summary.json and summary.md, and print the latter.

    Raises:
        UserError: a file cannot be written.
    """
    write_whole(folder / "summary.json", as_json(summary))
    page = markdown(summary)
    write_whole(folder / "summary.md", page)
    print(f"\n{page}")
    print(f"in {folder}: summary.md, summary.json, and a JSON file of each point")
    print(f"plots: recipe report {shlex.quote(str(folder))}")


def markdown(summary: Mapping[str, Any]) -> str:
    """Return the report as Markdown."""
    lines = [f"# Benchmark of {summary['model']}", ""]
    lines += [*_sentences(summary), "", *table(HEADER, [*_cells(summary)], ("Outcome",)), ""]
    lines += [
        "TTFT is the time to the first token and TPOT that of each further one, in ms: the median and the "
        "99th percentile over the requests of a point.",
        "",
    ]
    pairs = comparison(summary)
    if pairs:
        lines += ["## Compared with published figures", "", source(summary), ""]
        lines += [*table(("", "Published", "Measured"), [[*map(cell, pair)] for pair in pairs], ("",)), ""]
    for sentence in summary["left_out"]:
        lines.append(f"- Left out: {sentence}.")
    return "\n".join(lines).rstrip("\n") + "\n"


def _sentences(summary: Mapping[str, Any]) -> list[str]:
    settings, server = summary["settings"], summary["server"]
    version = f"vLLM {server['vllm']}" if server["vllm"] else "A server that does not report its version"
    lines = [
        summary["place"]["sentence"],
        f"{version}; {settings['prompts']:,} requests a point, {settings['output_length']:,} tokens out "
        f"each, random prompts{_when(summary)}.",
    ]
    price = summary["price"]
    if price is not None:
        lines.append(
            f"Cost: at US$ {price['usd_per_hour']:,.2f} an hour ({price['source']}), for output tokens, with "
            "the whole machine paid for."
        )
    return lines


def _when(summary: Mapping[str, Any]) -> str:
    days = sorted({row["measured"][:10] for row in summary["points"] if row["outcome"] == MEASURED})
    if not days:
        return ""
    return f"; {days[0]} to {days[-1]}" if len(days) > 1 else f"; {days[0]}"


def _cells(summary: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    for row in summary["points"]:
        where = (f"{row['input_length']:,}", row["rate"])
        if row["outcome"] != MEASURED:
            outcome = f"{row['outcome']}: {row['reason']}" if row["reason"] else row["outcome"]
            yield (*where, *["-"] * 6, cell(outcome))
            continue
        usd = row["usd_per_million_output_tokens"]
        yield (
            *where,
            f"{row['output_tokens_per_s']:,.1f}",
            *(ms(row[f"{part}_{name}_ms"]) for name in ("ttft", "tpot") for part in ("median", "p99")),
            "-" if usd is None else f"{usd:,.2f}",
            MEASURED,
        )


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
    """Figures that others published.

    Attributes:
        source: where they come from, as part of a sentence.
        figures: each has some of PUBLISHED_KEYS; "input" in tokens and "rate" in requests/s say under which
            load it was measured.
    """

    source: str = ""
    figures: tuple[Mapping[str, float], ...] = ()


def published_word(text: str) -> tuple[str, float]:
    """Parse one KEY=NUMBER of a published figure."""
    key, _, number = text.partition("=")
    if key not in PUBLISHED_KEYS:
        raise argparse.ArgumentTypeError(f"{key} is none of {', '.join(PUBLISHED_KEYS)}")
    return key, float(number)


def source(summary: Mapping[str, Any]) -> str:
    """Return the sentence above the comparison."""
    return (
        f"Published: {summary['published']['source']}; its requests may have been of another kind and number."
    )


def comparison(summary: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Pair published figures with this sweep's figures of the same quantity."""
    rows: list[tuple[str, str, str]] = []
    for figure in summary["published"]["figures"]:
        points = [r for r in summary["points"] if r["input_length"] == figure.get("input", r["input_length"])]
        measured = [row for row in points if row["outcome"] == MEASURED]
        part = f", of {len(measured)} of {len(points)} points" if len(measured) < len(points) else ""
        best = max(measured, key=lambda row: row["output_tokens_per_s"], default=None)
        length = f"{figure.get('input', 0):,.0f} tokens in"
        if "peak_output_tokens_per_s" in figure:
            sweep_value = f"{best['output_tokens_per_s']:,.0f}{part}" if best else "-"
            theirs = f"{figure['peak_output_tokens_per_s']:,.0f}"
            rows.append((f"peak output tokens/s, {length}", theirs, sweep_value))
        if "usd_per_million_output_tokens" in figure:
            usd = best["usd_per_million_output_tokens"] if best else None
            sweep_value = "-" if usd is None else f"{usd:.2f}{part}"
            name = f"US$ per million output tokens, {length}"
            rows.append((name, f"{figure['usd_per_million_output_tokens']:.2f}", sweep_value))
        if "median_ttft_ms" in figure:
            rate = figure.get("rate", 0)
            sweep_value = next(
                (ms(row["median_ttft_ms"]) for row in measured if float(row["rate"]) == rate), "-"
            )
            name = f"TTFT in ms, {length}, {rate:g} requests/s"
            rows.append((name, ms(figure["median_ttft_ms"]), sweep_value))
        if "lowest_tpot_ms" in figure and "highest_tpot_ms" in figure:
            medians = [row["median_tpot_ms"] for row in measured]
            sweep_value = f"{ms(min(medians))} to {ms(max(medians))}{part}" if medians else "-"
            low, high = figure["lowest_tpot_ms"], figure["highest_tpot_ms"]
            rows.append(("TPOT in ms, over the sweep", f"{ms(low)} to {ms(high)}", sweep_value))
    return rows


def ms(value: float) -> str:
    """Format milliseconds with three significant digits, but never round digits before the point."""
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:,.{digits}f}"
