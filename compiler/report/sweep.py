"""Serving sweeps: the measurements of bench.sh and `recipe serve bench`, their figures, and their page."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipec.compiler.pages.document import Block, Document, Facts, Figure, Plot, Section, Table, Text
from recipec.compiler.pages.html import COLORS, axis, scatter, write
from recipec.compiler.pages.numbers import NOT_KNOWN, SPACE, significant
from recipec.compiler.report.run_folder import Folder
from recipec.compiler.report.run_page import EXTRA, GENERATOR
from recipec.runtime.clients.bench_points import lacking, whole
from recipec.runtime.clients.bench_report import FIGURES, MEASURED, comparison, source

SUMMARY = "summary.json"
QUANTITIES = {"ttft": "time to first token", "tpot": "time per output token"}
"""Names of times in vLLM's client, spelled out."""
PARTS = ("p50", "p90", "p99")
TICKS = tuple(digit * 10**power for power in range(-2, 7) for digit in (1, 2, 5))
"""Ticks of a logarithmic axis; plotly's own show only leading digits."""
FAR_APART = 20.0
"""Longest over shortest time above which the axis is logarithmic."""


@dataclass(frozen=True)
class SweepPoint:
    """One measurement.

    Attributes:
        input_length: tokens of a prompt.
        rate: requests/s, or "inf".
        outcome, reason: "measured", "failed" or "not measured", and the reason or a note.
        figures: the summary's figures of a measured point: "output_tokens_per_s", "median_ttft_ms" and so on.
        result: vLLM's own result, {} if it is missing.
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
        """Return a time in ms: `name` as in "ttft", percentile `part` as in "p90"."""
        key = f"median_{name}_ms" if part == "p50" else f"{part}_{name}_ms"
        value = self.result.get(f"{part}_{name}_ms", self.result.get(key, self.figures.get(key)))
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@dataclass(frozen=True)
class Sweep:
    """The results in a folder.

    Attributes:
        name: of the folder.
        label: its name next to other sweeps.
        summary: its summary.json; {} if the sweep ended before writing it.
        points: by input length and rate.
        notes: sentences.
    """

    name: str
    label: str
    summary: Mapping[str, Any]
    points: tuple[SweepPoint, ...]
    notes: tuple[str, ...] = ()

    @property
    def model(self) -> str:
        return str(self.summary.get("model", NOT_KNOWN))

    @property
    def sentence(self) -> str:
        """A sentence on where it was measured."""
        place = self.summary.get("place")
        text = place.get("sentence") if isinstance(place, dict) else None
        return str(text or "Where it was measured is not recorded.")

    @property
    def measured(self) -> list[SweepPoint]:
        return [point for point in self.points if point.measured]

    @property
    def lengths(self) -> list[int]:
        return sorted({point.input_length for point in self.points})

    @property
    def published(self) -> list[tuple[str, str, str]]:
        """(figure, published value, value measured here) for each published figure; [] if there are none."""
        if not self.summary.get("published", {}).get("figures"):
            return []
        return comparison(self.summary)


def read_sweep(folder: Folder, label: str = "") -> Sweep | None:
    """Read the sweep in a folder; None if there is none."""
    summary = folder.object(SUMMARY)
    if not isinstance(summary.get("points"), list):
        summary = {}
    records: dict[tuple[int, str], dict[str, Any]] = {}
    for name in fnmatch.filter(sorted(folder.entries()), "input-*-rate-*.json"):
        record = folder.object(name)
        point = record.get("point")
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
        SweepPoint(
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
        folder.name,
        label or folder.name,
        {**summary, "settings": settings or {}, "points": rows},
        tuple(points),
        (*notes, *(f"Left out: {point}." for point in summary.get("left_out") or [])),
    )


def _is_point(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("input_length"), int):
        return False
    try:
        return float(row["rate"]) > 0
    except (KeyError, TypeError, ValueError):
        return False


def _rows(records: Mapping[tuple[int, str], Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield points in the summary's form, from their files."""
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


def percentiles(sweep: Sweep) -> Table:
    """Tabulate the points: throughput, percentiles of each time, cost, and the outcome."""
    out = []
    for point in sweep.points:
        where = (f"{point.input_length:,}", point.load)
        if not point.measured:
            text = f"{point.outcome}: {point.reason}" if point.reason else point.outcome
            out.append((*where, *[""] * (2 + 2 * len(PARTS)), text))
            continue
        usd = point.figures.get("usd_per_million_output_tokens")
        known = [point.time(name, part) for name in ("ttft", "tpot") for part in PARTS]
        out.append(
            (
                *where,
                significant(point.figures.get("output_tokens_per_s"), 3),
                *("" if value is None else significant(value, 3) for value in known),
                "" if usd is None else f"{usd:,.2f}",
                f"measured; {point.reason}" if point.reason else "measured",
            )
        )
    times = [f"{name.upper()} {part}" for name in ("ttft", "tpot") for part in PARTS]
    head = ("tokens in", "requests/s", "output tokens/s", *times, "US$ a million", "outcome")
    return Table(head, out, words=(len(head) - 1,), label=f"Every point of {sweep.label}")


def peak(points: Sequence[SweepPoint], name: str, lowest: bool = False) -> SweepPoint | None:
    """Return the point with the highest value of a figure, or the lowest."""
    known = [point for point in points if name in point.figures]
    if not known:
        return None
    return (min if lowest else max)(known, key=lambda point: point.figures[name])


def figures(sweep: Sweep) -> list[Figure]:
    """Return the figures at the top of the page, with the point each was measured at."""
    out = []
    for name, key, unit, lowest in (
        ("Highest throughput", "output_tokens_per_s", "tokens/s", False),
        ("Shortest median time to first token", "median_ttft_ms", "ms", True),
        ("Shortest median time per output token", "median_tpot_ms", "ms", True),
        ("Lowest cost of a million output tokens", "usd_per_million_output_tokens", "US$", True),
    ):
        point = peak(sweep.measured, key, lowest)
        if point is None:
            if unit != "US$":
                out.append(Figure(name, NOT_KNOWN))
            continue
        value = significant(point.figures[key], 3)
        rate = "all at once" if point.rate == "inf" else f"{point.rate} requests/s"
        text = f"US${point.figures[key]:,.2f}" if unit == "US$" else f"{value}{SPACE}{unit}"
        out.append(Figure(name, text, (f"{point.input_length:,} tokens in, {rate}",)))
    measured = len(sweep.measured)
    out.append(Figure("Points measured", f"{measured} of {len(sweep.points)}"))
    return out


def plots(sweeps: Sequence[Sweep]) -> list[Plot]:
    """Plot throughput and times over the request rate, then times over throughput; [] if nothing was
    measured."""
    if not any(sweep.measured for sweep in sweeps):
        return []
    return [
        _throughput(sweeps),
        *(_time(sweeps, name) for name in ("ttft", "tpot")),
        *(_against(sweeps, name) for name in ("ttft", "tpot")),
    ]


def _series(sweeps: Sequence[Sweep]) -> Iterator[tuple[str, str, int, Sweep, list[SweepPoint]]]:
    """Yield each sweep's points of one input length, including points without figures: color, name, length,
    sweep and points."""
    number = 0
    for sweep in sweeps:
        for length in sweep.lengths:
            whose = f"{sweep.label}, " if len(sweeps) > 1 else ""
            points = [point for point in sweep.points if point.input_length == length]
            yield COLORS[number % len(COLORS)], f"{whose}{length:,} tokens in", length, sweep, points
            number += 1


def _rates(sweeps: Sequence[Sweep]) -> list[str]:
    points = {float(point.rate): point.load for sweep in sweeps for point in sweep.points}
    return [points[rate] for rate in sorted(points)]


def _plot(
    key: str, title: str, what: str, traces: Sequence[Mapping[str, Any]], x: dict[str, Any], y: dict[str, Any]
) -> Plot:
    # Below the axis, a row of the legend for each curve: in the window of a phone no two fit side by side.
    below = 60 + 22 * sum(trace.get("showlegend", True) for trace in traces)
    layout = {"xaxis": x, "yaxis": y, "margin": {"l": 60, "r": 12, "t": 8, "b": below}}
    return Plot(key, title, traces, layout, 290 + below, what)


def _rate_axis(sweeps: Sequence[Sweep]) -> dict[str, Any]:
    return axis(
        "request rate (requests/s)",
        type="category",
        categoryorder="array",
        categoryarray=_rates(sweeps),
    )


def _throughput(sweeps: Sequence[Sweep]) -> Plot:
    traces, levels = [], set()
    for color, name, length, sweep, points in _series(sweeps):
        y = [point.figures.get("output_tokens_per_s") for point in points]
        traces.append(scatter(name, [point.load for point in points], y, color, "lines+markers"))
        for figure in _published(sweep, length):
            level = figure.get("peak_output_tokens_per_s")
            if level is not None and (length, level) not in levels:
                levels.add((length, level))
                rates, called = _rates(sweeps), f"{length:,} tokens in, published peak"
                traces.append(scatter(called, rates, [level] * len(rates), color, dash="dot"))
    return _plot(
        "throughput",
        "Output tokens a second",
        "Of all requests together, against the rate at which they came. Gaps are points without figures.",
        traces,
        _rate_axis(sweeps),
        axis("output tokens/s", rangemode="tozero"),
    )


def _time(sweeps: Sequence[Sweep], name: str) -> Plot:
    traces: list[dict[str, Any]] = []
    values: list[float] = []
    for color, called, length, sweep, points in _series(sweeps):
        loads = [point.load for point in points]
        for part, words, dash in (("p50", "median", "solid"), ("p99", "p99", "dash")):
            y = [point.time(name, part) if point.measured else None for point in points]
            values += [value for value in y if value]
            traces.append(scatter(f"{called}, {words}", loads, y, color, "lines+markers", dash=dash))
        stars = [
            (load, figure["median_ttft_ms"])
            for figure in _published(sweep, length)
            for load, rate in ((point.load, float(point.rate)) for point in sweep.points)
            if name == "ttft" and "median_ttft_ms" in figure and figure.get("rate") == rate
        ]
        if stars:
            x, heights = zip(*dict.fromkeys(stars), strict=True)
            called = f"{length:,} tokens in, published median"
            if all((called, heights) != (other["name"], other["y"]) for other in traces):
                traces.append(scatter(called, x, heights, color, "markers", symbol="star", size=13))
    far = bool(values) and max(values) > FAR_APART * min(values)
    what = "From sending a request to its answer's first token; gaps are points without figures."
    return _plot(
        name,
        f"{QUANTITIES[name].capitalize()} ({name.upper()})",
        what if name == "ttft" else "Of each token after an answer's first one.",
        traces,
        _rate_axis(sweeps),
        axis("ms", **({"type": "log", "tickvals": TICKS} if far else {"rangemode": "tozero"})),
    )


def _against(sweeps: Sequence[Sweep], name: str) -> Plot:
    traces = []
    for color, called, _, _, points in _series(sweeps):
        known = [point for point in points if point.measured and point.time(name, "p50") is not None]
        known.sort(key=lambda point: point.figures.get("output_tokens_per_s", 0.0))
        x = [point.figures.get("output_tokens_per_s") for point in known]
        y = [point.time(name, "p50") for point in known]
        labels = {"text": [point.load for point in known], "textposition": "top center"}
        traces.append(scatter(called, x, y, color, "lines+markers+text", **labels))
    quantity = QUANTITIES[name]
    return _plot(
        f"{name}-against-throughput",
        f"Throughput against {quantity}",
        f"What a higher load costs each request: the median {quantity} ({name.upper()}) at the output tokens "
        "a second that were reached. The texts are request rates.",
        traces,
        axis("output tokens/s"),
        axis(f"median {name.upper()} (ms)", rangemode="tozero"),
    )


def _published(sweep: Sweep, length: int) -> list[dict[str, float]]:
    figures = sweep.summary.get("published", {}).get("figures", [])
    return [figure for figure in figures if figure.get("input") == length]


def sweep_page(sweeps: Sequence[Sweep]) -> str:
    """Build the page of serving sweeps. The first is the one that the others are compared with."""
    first, several = sweeps[0], len(sweeps) > 1
    drawn = plots(sweeps)
    alarms = []
    for sweep in sweeps:
        for point in sweep.points:
            if not point.measured:
                load = "all requests at once" if point.rate == "inf" else f"{point.rate} requests/s"
                whose, why = (
                    f"{sweep.label}, " if several else "",
                    f": {point.reason}" if point.reason else "",
                )
                heading = f"{whose}{point.input_length:,} tokens in, {load}{why}"
                alarms.append((f"{point.outcome.capitalize()}.", heading))
    compared = (
        f"{', '.join(sweep.label for sweep in sweeps)} compared; the figures are those of {first.label}."
    )
    places = [f"{sweep.label}: {sweep.sentence}" if several else sweep.sentence for sweep in sweeps]
    measured = (
        "TTFT is the time from a request to its first token, TPOT the time per output token after it. Drag "
        "across a plot to look closer, double-click to see all again."
    )
    points = (
        "TTFT (time to first token) and TPOT (time per output token) in ms: p50 is the median over the "
        "requests of a point, p99 what 99 % of them do not exceed."
    )
    none = Text("No point was measured: there is nothing to draw.", "")
    tables: list[Block] = []
    for sweep in sweeps:
        tables += [Text(sweep.label, "heading")] if several else []
        tables.append(percentiles(sweep))
    return write(
        Document(
            title=f"Report on Serving {first.model}",
            generator=GENERATOR,
            command=("recipe report", "serving sweep"),
            name=f"Serving {first.model}",
            hardware=(),
            figures=figures(first),
            sections=[
                Section("measured", "Measured", (measured,), drawn or [none]),
                Section("points", "Every point", (points,), tables),
                *(
                    _published_section(sweep, number, several)
                    for number, sweep in enumerate(sweeps, 1)
                    if sweep.published
                ),
                Section(
                    "basis",
                    "What this rests on",
                    (),
                    [block for sweep in sweeps for block in _rests_on(sweep)],
                ),
            ],
            alarms=alarms,
            sentence=" ".join([*([compared] if several else []), *places]),
        ),
        EXTRA,
    )


def _published_section(sweep: Sweep, number: int, several: bool) -> Section:
    head = ("", "published", f"measured, {sweep.label}" if several else "measured")
    table = Table(head, sweep.published, label="Published figures")
    return Section(
        f"published-{number}", "Compared with published figures", (source(sweep.summary),), (table,)
    )


def _rests_on(sweep: Sweep) -> list[Any]:
    settings, price = sweep.summary["settings"], sweep.summary.get("price")
    version = (sweep.summary.get("server") or {}).get("vllm")
    facts = [
        ("folder", sweep.name),
        ("requests of a point", settings.get("prompts", NOT_KNOWN)),
        ("tokens of an answer", settings.get("output_length", NOT_KNOWN)),
        ("server", f"vLLM {version}" if version else "does not report its version"),
        ("price", f"US$ {price['usd_per_hour']:.2f} an hour, {price['source']}" if price else "none"),
    ]
    return [Facts(facts, sweep.label), *map(Text, sweep.notes)]
