"""A serving sweep: what bench.sh and `recipe serve bench` measured, point by point."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipec.compiler.report.numbers import NOT_KNOWN, significant
from recipec.compiler.report.place import Place
from recipec.runtime.serving.bench_points import lacking, whole
from recipec.runtime.serving.bench_report import MEASURED, comparison

SUMMARY = "summary.json"
QUANTITIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between tokens",
    "e2el": "time to the last token",
}
"""What vLLM's client calls a time, spelt out."""
PARTS = ("p50", "p90", "p99")


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        input_length: tokens of a prompt.
        rate: requests/s, or "inf".
        outcome, reason: "measured", "failed" or "not measured", and why or what to know.
        figures: the summary's, of a measured point: "output_tokens_per_s", "median_ttft_ms" and so on.
        result: vLLM's own, {} where it is not there.
    """

    input_length: int
    rate: str
    outcome: str
    reason: str
    figures: Mapping[str, float]
    result: Mapping[str, Any]

    @property
    def measured(self) -> bool:
        return self.outcome == MEASURED

    @property
    def load(self) -> str:
        return "all at once" if self.rate == "inf" else self.rate

    def time(self, name: str, part: str) -> float | None:
        """ms, of a percentile: "ttft", "p90"."""
        key = f"median_{name}_ms" if part == "p50" else f"{part}_{name}_ms"
        value = self.result.get(f"{part}_{name}_ms", self.result.get(key, self.figures.get(key)))
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Sweep:
    """The results of a folder.

    Attributes:
        name: of the folder.
        label: what it is called beside other sweeps.
        summary: its summary.json; {} where the sweep ended before it was written.
        points: by input length and rate.
        notes: sentences.
    """

    name: str
    label: str
    summary: Mapping[str, Any]
    points: tuple[Point, ...]
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return str(self.summary.get("model", NOT_KNOWN))

    @property
    def sentence(self) -> str:
        """Where it was measured."""
        place = self.summary.get("place")
        said = place.get("sentence") if isinstance(place, dict) else None
        return str(said or "Where it was measured is not recorded.")

    @property
    def measured(self) -> list[Point]:
        return [point for point in self.points if point.measured]

    @property
    def lengths(self) -> list[int]:
        return sorted({point.input_length for point in self.points})

    @property
    def published(self) -> list[tuple[str, str, str]]:
        """What, as published, and as measured here; [] where nothing is."""
        if not self.summary.get("published", {}).get("figures"):
            return []
        return comparison(self.summary)


def read_sweep(place: Place, label: str = "") -> Sweep | None:
    """The sweep in a folder; None where there is none."""
    names = place.names()
    summary = place.value(SUMMARY)
    if not isinstance(summary, dict) or not isinstance(summary.get("points"), list):
        summary = {}
    files = [
        name for name in names if name.startswith("input-") and "-rate-" in name and name.endswith(".json")
    ]
    records: dict[tuple[int, str], dict[str, Any]] = {}
    for name in files:
        record = place.value(name)
        point = record.get("point") if isinstance(record, dict) else None
        if isinstance(point, dict) and isinstance(point.get("input_length"), int):
            records[point["input_length"], str(point.get("rate"))] = record
    if not summary and not records:
        return None
    notes = []
    if not summary:
        notes.append(
            f"There is no {SUMMARY}: the sweep ended before it was written. Points are from their files."
        )
    rows = [row for row in summary.get("points") or _rows(records) if _is_point(row)]
    points = [
        Point(
            row["input_length"],
            str(row["rate"]),
            str(row.get("outcome")),
            str(row.get("reason") or ""),
            {k: v for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)},
            (records.get((row["input_length"], str(row["rate"]))) or {}).get("result") or {},
        )
        for row in rows
    ]
    points.sort(key=lambda point: (point.input_length, float(point.rate)))
    settings = summary.get("settings") or (next(iter(records.values())).get("settings") if records else {})
    return Sweep(
        place.name,
        label or place.name,
        {**summary, "settings": settings or {}, "points": rows},
        tuple(points),
        (*notes, *(f"Left out: {one}." for one in summary.get("left_out") or [])),
    )


def _is_point(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("input_length"), int):
        return False
    try:
        return float(row["rate"]) > 0
    except (KeyError, TypeError, ValueError):
        return False


def _rows(records: Mapping[tuple[int, str], Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Points as a summary has them, from their files."""
    from recipec.runtime.serving.bench_report import FIGURES

    for (length, rate), record in records.items():
        row: dict[str, Any] = {"input_length": length, "rate": rate}
        if whole(record):
            result = record["result"]
            figures = {name: result[key] for name, key in FIGURES.items()}
            yield {**row, **figures, "outcome": MEASURED, "reason": record.get("note")}
        else:
            reason = record.get("failure") or _missing(record)
            yield {**row, "outcome": "failed", "reason": reason}


def _missing(record: Mapping[str, Any]) -> str:
    result = record.get("result")
    if not isinstance(result, dict):
        return "there is no result"
    return f"the result has no {lacking(result)}" if lacking(result) else "not all requests were answered"


def percentile_rows(sweep: Sweep) -> list[tuple[str, ...]]:
    """A line for each point: throughput, percentiles of each time, cost, and what came of it."""
    out = []
    for point in sweep.points:
        where = (f"{point.input_length:,}", point.load)
        if not point.measured:
            said = f"{point.outcome}: {point.reason}" if point.reason else point.outcome
            out.append((*where, *[""] * (2 + 2 * len(PARTS)), said))
            continue
        usd = point.figures.get("usd_per_million_output_tokens")
        times = [point.time(name, part) for name in ("ttft", "tpot") for part in PARTS]
        out.append(
            (
                *where,
                significant(point.figures.get("output_tokens_per_s"), 3),
                *("" if value is None else significant(value, 3) for value in times),
                "" if usd is None else f"{usd:,.2f}",
                f"measured; {point.reason}" if point.reason else "measured",
            )
        )
    return out


def peak(points: Sequence[Point], name: str, lowest: bool = False) -> Point | None:
    """The point with the highest figure, or the lowest."""
    known = [point for point in points if name in point.figures]
    if not known:
        return None
    return (min if lowest else max)(known, key=lambda point: point.figures[name])
